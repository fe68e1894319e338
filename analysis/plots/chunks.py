"""Memory and time over the number and the size of chunks (table 8, figure 5)."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from analysis import style
from analysis.compare import ANSWERED, Context
from analysis.load import GIB
from analysis.plots.parts import Drawn, models_of, panels_of_figure, text_of

GB = 1e9


def linear_example(rows: pd.DataFrame, context: Context) -> list[Drawn]:
    """Memory and time of the linear example over the number of chunks (table 8)."""
    panels_of = (
        ("peak_bytes", "Peak memory (10⁹ bytes)", GB),
        ("intermediate_peak_bytes", "Intermediate peak (10⁹ bytes)", GB),
        ("forward_backward_time_s", "Forward + backward (s)", 1.0),
    )
    figure, panels = panels_of_figure(3, 3.1)
    for axes, (quantity, label, scale) in zip(panels, panels_of, strict=True):
        own = rows[rows["quantity"] == quantity].sort_values("num_chunks")
        kinds = " / ".join(sorted(set(own["provenance"].dropna())))
        colour, marker = style.METHODS["streambp"]
        run = own[own["ours"].notna()]
        known = own[own["published"].notna()]
        axes.plot(
            known["num_chunks"],
            known["published"] / scale,
            color="#555555",
            marker="s",
            markerfacecolor="white",
            markersize=6,
            linestyle=":",
        )
        axes.plot(run["num_chunks"], run["ours"] / scale, color=colour, marker=marker)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0, own[["ours", "published"]].max().max() / scale * 1.1)
        axes.set_title(label, loc="left", fontsize=9)
        axes.set_xlabel(f"Number of chunks\n(ours: {kinds})" if kinds else "Number of chunks")
    legend_handles = [panels[0].lines[1], panels[0].lines[0]]
    labels = ["ours", "published"]
    if not rows["published"].notna().any():
        legend_handles, labels = legend_handles[:1], labels[:1]
    title = f"Linear example, {context.device_label}"
    text = text_of(rows)
    figure = style.finish(figure, title, text, legend=(legend_handles, labels))
    return [("linear_example", title, text, figure)]


def ablation(rows: pd.DataFrame, context: Context) -> list[Drawn]:
    """Peak memory and time over the chunk size (figure 5); checkpointing as a level."""
    figure, panels = panels_of_figure(2, 3.5, columns=2)
    for axes, (quantity, label, scale) in zip(
        panels,
        (
            ("peak_bytes", "Peak memory (GiB)", GIB),
            ("forward_backward_time_s", "Forward + backward (s)", 1.0),
        ),
        strict=True,
    ):
        own = rows[(rows["quantity"] == quantity) & rows["cell"].isin(ANSWERED)]
        kinds = " / ".join(sorted(set(own["provenance"].dropna())))
        chunked = own[own["chunk_size_tokens"].notna()].sort_values("chunk_size_tokens")
        colour, marker = style.METHODS["streambp"]
        axes.plot(
            chunked["chunk_size_tokens"], chunked["ours"] / scale, color=colour, marker=marker
        )
        for row in own[own["method"].isin(["checkpointing", "standard"])].itertuples():
            value: Any = row.ours
            colour = style.METHODS[str(row.method)][0]
            axes.axhline(value / scale, color=colour, linestyle="--")
        axes.set_xscale("log")
        sizes = sorted(chunked["chunk_size_tokens"].unique())
        axes.set_xticks(sizes, [style.thousands(size) for size in sizes], rotation=45)
        axes.minorticks_off()
        axes.set_ylim(0, float(own["ours"].max()) / scale * 1.1)
        axes.set_title(f"{label}, {kinds}", loc="left")
        axes.set_xlabel("Chunk size (tokens)")
    run = rows[rows["device_label"].notna()]
    handles: list[Any] = [Line2D([], [], color=style.METHODS["streambp"][0], marker="o")]
    labels = ["streambp"]
    for method in ("standard", "checkpointing"):
        if (run["method"] == method).any():
            handles.append(Line2D([], [], color=style.METHODS[method][0], linestyle="--"))
            labels.append(f"{method} (no chunks)")
    length = ", ".join(f"{value:,.0f}" for value in dict.fromkeys(run["seq_len_tokens"]))
    title = f"Chunk size, {models_of(rows)}, T = {length}, {context.device_label}"
    text = f"{text_of(rows)} The paper gives no numbers for its figure 5."
    figure = style.finish(figure, title, text, legend=(handles, labels))
    return [("chunk_size_ablation", title, text, figure)]
