"""Lines of our runs and of the published numbers, crosses for what did not fit, their legend."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import style
from analysis.compare import ANSWERED, method_order
from analysis.plots.parts import variants

# Further variants of a method, one after the other: dash pattern and marker fill.
LINES: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def draw_lines(
    axes: Axes, rows: pd.DataFrame, x: str, scale: float, *, published: bool = True
) -> None:
    """A line per variant, and a dashed one per published method."""
    methods = sorted(dict.fromkeys(rows["method"]), key=method_order)
    for method in methods:
        own = rows[rows["method"] == method]
        colour, marker = style.method_style(method, methods)
        known = own[own["published"].notna()].drop_duplicates(x).sort_values(x)
        if published and len(known):
            axes.plot(
                known[x],
                known["published"] / scale,
                color=colour,
                marker=marker,
                markerfacecolor="white",
                markersize=6.5,
                linestyle=":",
                linewidth=1.1,
                zorder=3,
            )
        for index, variant in enumerate(v for v in variants(own)):
            line = own[(own["variant"] == variant) & own["cell"].isin(ANSWERED)]
            line = line[line["ours"].notna()].sort_values(x)
            axes.plot(
                line[x],
                line["ours"] / scale,
                color=colour,
                marker=marker,
                markersize=3.5,
                linestyle=LINES[index % len(LINES)],
                zorder=3.5,
            )


def mark_oom(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    """Crosses along the top for the settings that did not fit, a row per variant."""
    lost = rows[rows["cell"] == "oom"]
    if lost.empty:
        return
    own = [variant for variant in variants(rows) if (lost["variant"] == variant).any()]
    methods = list(dict.fromkeys(rows["method"]))
    for height, variant in enumerate(own):
        found = lost[lost["variant"] == variant]
        colour, _ = style.method_style(found["method"].iloc[0], methods)
        axes.plot(
            found[x],
            [0.985 - 0.042 * height] * len(found),
            color=colour,
            marker="x",
            markersize=6,
            markeredgewidth=1.8,
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            zorder=4,
        )


def legend_of(rows: pd.DataFrame, *, published: bool = True) -> tuple[list[Any], list[str]]:
    """A handle per variant with its provenance, per published method, and for OOM."""
    handles, labels = [], []
    methods = sorted(dict.fromkeys(rows["method"]), key=method_order)
    for method in methods:
        own = rows[rows["method"] == method]
        colour, marker = style.method_style(method, methods)
        for index, variant in enumerate(variants(own)):
            kinds = own.loc[own["variant"] == variant, "provenance"].dropna()
            kinds = " / ".join(sorted(set(kinds)))
            line = LINES[index % len(LINES)]
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle=line))
            labels.append(f"{variant}, {kinds}" if kinds else variant)
        if published and own["published"].notna().any():
            handles.append(
                Line2D(
                    [],
                    [],
                    color=colour,
                    marker=marker,
                    markerfacecolor="white",
                    linestyle=":",
                    linewidth=1.1,
                )
            )
            labels.append(f"{method}, published")
    if (rows["cell"] == "oom").any():
        handles.append(
            Line2D([], [], color="#555555", marker="x", linestyle="none", markeredgewidth=1.8)
        )
        labels.append("OOM: does not fit")
    return handles, labels
