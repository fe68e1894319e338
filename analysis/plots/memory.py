"""Peak memory over the sequence length (figure 3, table 9)."""

from __future__ import annotations

import pandas as pd

from analysis import style
from analysis.compare import Context
from analysis.load import GIB
from analysis.plots.levels import mark_levels
from analysis.plots.lines import draw_lines, headroom, legend_of, mark_oom
from analysis.plots.parts import Drawn, panels_of_figure, text_of


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
        axes.set_ylim(0, highest / GIB * headroom(own, "seq_len_tokens"))
        style.tokens(axes.xaxis)
    panels[0].set_ylabel("Peak memory (GiB)")
    experiment = run["experiment"].iloc[0]
    title = f"Peak memory over sequence length, {context.device_label}"
    text = text_of(rows)
    figure = style.finish(figure, title, text, legend=legend_of(rows))
    figure.draw_without_rendering()  # the panels take their places
    for axes, (model, tuning) in zip(panels, settings, strict=True):
        mark_levels(axes, rows[(rows["model"] == model) & (rows["tuning"] == tuning)])
    return [(experiment, title, text, figure)]
