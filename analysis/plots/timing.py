"""Seconds over the sequence length and by batch size (tables 1 and 2)."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from analysis import style
from analysis.compare import Context, method_order
from analysis.plots.bars import bar_legend, draw_bars
from analysis.plots.lines import LINES, draw_lines, headroom, legend_of, mark_oom
from analysis.plots.parts import Drawn, models_of, panels_of_figure, text_of, variants


def time(rows: pd.DataFrame, context: Context) -> list[Drawn]:
    """Seconds over sequence length (table 1), and the ratio to checkpointing below."""
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        figsize=(style.WIDTH, 5.6),
        layout="constrained",
        sharex=True,
        height_ratios=(2, 1.2),
    )
    draw_lines(top, rows, "seq_len_tokens", 1)
    mark_oom(top, rows, "seq_len_tokens")
    top.set_ylabel("Forward + backward (s)")
    top.set_ylim(0, _timed_top(rows, "seq_len_tokens"))
    top.set_title(models_of(rows), loc="left")
    _ratio_lines(bottom, rows, "seq_len_tokens")
    bottom.set_ylabel("Time relative to\ncheckpointing")
    bottom.set_xlabel("Sequence length (tokens)")
    style.tokens(bottom.xaxis)
    title = f"Time of a forward and backward pass, {context.device_label}"
    text = text_of(rows)
    return [
        ("bp_time_table", title, text, style.finish(figure, title, text, legend=legend_of(rows)))
    ]


def _ratio_lines(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    """Each method's time over that of checkpointing of the same kind (ours, published)."""
    methods = sorted(dict.fromkeys(rows["method"]), key=method_order)
    axes.axhline(1, color="#999999", linewidth=0.9)
    for column in ("ours", "published"):
        usable = rows[rows[column].notna()]
        base = usable[usable["method"] == "checkpointing"].drop_duplicates(x).set_index(x)[column]
        for method in (name for name in methods if name not in ("checkpointing", "standard")):
            own = usable[usable["method"] == method]
            names = variants(own) if column == "ours" else ["published"]
            for index, variant in enumerate(names):
                line = own if column == "published" else own[own["variant"] == variant]
                line = line.drop_duplicates(x).set_index(x)[column]
                ratio = (line / base).dropna().sort_index()
                colour, marker = style.method_style(method, methods)
                published = column == "published"
                axes.plot(
                    ratio.index,
                    ratio.to_numpy(),
                    color=colour,
                    marker=marker,
                    markersize=4,
                    linestyle=":" if published else LINES[index % len(LINES)],
                    markerfacecolor="white" if published else colour,
                )


def _timed_top(rows: pd.DataFrame, x: str) -> float:
    """The upper limit of an axis of seconds, with room for the marks of what did not fit."""
    return float(rows[["ours", "published"]].astype(float).max().max()) * headroom(rows, x)


def batch(rows: pd.DataFrame, context: Context) -> list[Drawn]:
    """Seconds per sequence by batch size (table 2), and the largest batch."""
    timed = rows[rows["quantity"] == "per_sample_time_s"]
    searched = rows[rows["quantity"] == "max_batch_size"]
    has_time = bool(timed["ours"].notna().any())
    has_search = bool(searched["ours"].notna().any())
    figure, panels = panels_of_figure(max(1, has_time + has_search), 3.9, columns=2)
    labels: list[str] = []
    if has_time:
        axes = panels[0]
        draw_lines(axes, timed, "batch_size", 1)
        mark_oom(axes, timed, "batch_size")
        axes.set_xscale("log", base=2)
        sizes = sorted(timed["batch_size"].dropna().unique())
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.set_xlabel("Batch size (sequences)")
        axes.set_ylabel("Forward + backward per sequence (s)")
        axes.set_ylim(0, _timed_top(timed, "batch_size"))
        run = timed[timed["device_label"].notna()]
        axes.set_title(f"{models_of(timed)}, T = {run['seq_len_tokens'].iloc[0]:,.0f}", loc="left")
    if has_search:
        axes = panels[-1]
        axes.set_ylim(0, float(searched["ours"].max()) * 1.2)
        labels = draw_bars(axes, searched, ("model", "seq_len_tokens"))
        axes.set_ylabel("Largest batch (sequences)")
        axes.set_xlabel("model, T")
        axes.set_title("Whole training step", loc="left")
    title = f"Batch size, {context.device_label}"
    text = text_of(rows)
    legend = legend_of(timed) if has_time else bar_legend(labels)
    if has_time and has_search:
        handles, names = bar_legend(labels)
        legend = (legend[0] + handles, legend[1] + names)
    return [("batch_table", title, text, style.finish(figure, title, text, legend=legend))]
