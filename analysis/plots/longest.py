"""The longest sequence of each method (table 3)."""

from __future__ import annotations

import pandas as pd

from analysis import style
from analysis.compare import Context
from analysis.plots.bars import bar_legend, draw_bars
from analysis.plots.parts import Drawn, panels_of_figure, text_of


def max_seq_len(rows: pd.DataFrame, context: Context) -> list[Drawn]:
    """Longest sequences as bars (table 3), a panel per tuning."""
    run = rows[rows["device_label"].notna()]
    rows = rows[rows["objective"].isin(run["objective"].unique())]
    tunings = list(dict.fromkeys(run["tuning"]))
    figure, panels = panels_of_figure(len(tunings), 3.7, columns=1)
    labels: list[str] = []
    for axes, tuning in zip(panels, tunings, strict=True):
        own = rows[rows["tuning"] == tuning]
        known = own[["ours", "published"]].astype(float)
        lowest, highest = known.min().min(), known.max().max()
        log = bool(highest > 20 * lowest)
        if log:
            axes.set_yscale("log")
            axes.set_ylim(lowest / 3, highest * 5)
        else:
            axes.set_ylim(0, highest * 1.35)
        found = draw_bars(axes, own, ("model",))
        labels += [label for label in found if label not in labels]
        axes.set_title(f"{tuning} tuning", loc="left")
        axes.set_ylabel("Longest sequence (tokens" + (", log scale)" if log else ")"))
    title = f"Longest sequence of a whole training step, {context.device_label}"
    text = text_of(rows)
    figure = style.finish(figure, title, text, legend=bar_legend(labels))
    return [("max_seq_len_table", title, text, figure)]
