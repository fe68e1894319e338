"""Peak memory over the sequence length (figure 3, table 9)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import style
from analysis.compare import Context
from analysis.load import GIB
from analysis.plots.lines import draw_lines, legend_of, mark_oom
from analysis.plots.parts import HEADROOM, Drawn, panels_of_figure, text_of


def memory(rows: pd.DataFrame, context: Context) -> list[Drawn]:
    """Peak memory over sequence length, a panel per model (figure 3, table 9)."""
    run = rows[rows["device_label"].notna()]
    settings = list(dict.fromkeys(zip(run["model"], run["tuning"], strict=True)))
    figure, panels = panels_of_figure(len(settings), 3.6 if len(settings) > 1 else 3.9)
    for axes, (model, tuning) in zip(panels, settings, strict=True):
        own = rows[(rows["model"] == model) & (rows["tuning"] == tuning)]
        draw_lines(axes, own, "seq_len_tokens", GIB)
        mark_oom(axes, own, "seq_len_tokens")
        axes.set_title(f"{model}, {tuning}", loc="left")
        axes.set_xlabel("Sequence length (tokens)")
        axes.set_xlim(left=0)
        highest = own[["ours", "published", "budget_bytes"]].where(own["cell"] != "oom").max().max()
        axes.set_ylim(0, highest / GIB * HEADROOM)
        _mark_budget(axes, own)
        style.tokens(axes.xaxis)
    panels[0].set_ylabel("Peak memory (GiB)")
    experiment = run["experiment"].iloc[0]
    title = f"Peak memory over sequence length, {context.device_label}"
    text = text_of(rows)
    return [(experiment, title, text, style.finish(figure, title, text, legend=legend_of(rows)))]


def _mark_budget(axes: Axes, rows: pd.DataFrame) -> None:
    """A line at the memory that tensors may have, and one at what is resident in any method.

    Wants the limits of the y axis set.
    """
    budgets = rows["budget_bytes"].dropna().unique()
    if len(budgets) == 1:
        _level(axes, budgets[0] / GIB, f"{budgets[0] / GIB:.1f} GiB usable", "-", above=True)
    resident = (rows["weights_bytes"] + rows["gradients_bytes"]).dropna().unique()
    if len(resident) == 1:
        height = resident[0] / GIB
        low = height < 0.1 * axes.get_ylim()[1]  # no room for a word under the line
        _level(axes, height, f"weights, gradients {height:.3g} GiB", "--", above=low)


def _level(axes: Axes, height: float, label: str, line: str, *, above: bool) -> None:
    """A thin labelled line across; above: label over it, else under it."""
    axes.axhline(height, color="#999999", linewidth=0.9, linestyle=line, zorder=1)
    axes.annotate(
        label,
        (0.99, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2 if above else -2.5),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        fontsize=7.5,
        color="#666666",
    )
