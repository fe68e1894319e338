"""Lines of our runs and of the published numbers, crosses for what did not fit, their legend."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from analysis import style
from analysis.compare import ANSWERED, method_order
from analysis.plots.parts import variants

# Further variants of a method, one after the other: dash pattern and marker fill.
LINES: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_ROW_POINTS = 8.5  # between the crosses of one variant and those of the next
OURS_OOM: dict[str, Any] = {
    "marker": "x",
    "markersize": 6,
    "markeredgewidth": 1.8,
    "linestyle": "none",
}
PUBLISHED_OOM: dict[str, Any] = {
    "marker": "X",
    "markersize": 7,
    "markeredgewidth": 0.9,
    "markerfacecolor": "white",
    "linestyle": "none",
}


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
    """Crosses along the top for the settings that did not fit: a row for each of our variants,
    then a row of hollow ones for each published method."""
    methods = list(dict.fromkeys(rows["method"]))
    ours, stated = _oom_lines(rows, x)
    figure: Any = axes.figure
    for height, found in enumerate([*ours, *stated]):
        colour, _ = style.method_style(found["method"].iloc[0], methods)
        axes.plot(
            found[x],
            [1] * len(found),
            **(OURS_OOM if height < len(ours) else PUBLISHED_OOM),
            color=colour,
            transform=offset_copy(
                axes.get_xaxis_transform(),
                figure,
                y=-3 - _ROW_POINTS * height,
                units="points",
            ),
            clip_on=False,
            zorder=4,
        )


def headroom(rows: pd.DataFrame, x: str) -> float:
    """Of the y axis over its largest number: room for the crosses of what did not fit."""
    return 1.14 + 0.06 * max(1, sum(map(len, _oom_lines(rows, x))))


def _oom_lines(rows: pd.DataFrame, x: str) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
    """What did not fit: by variant of ours, and by method of the published ones."""
    lost, stated = rows[rows["cell"] == "oom"], published_oom(rows)
    ours = [lost[lost["variant"] == v] for v in variants(rows) if (lost["variant"] == v).any()]
    methods = sorted(dict.fromkeys(stated["method"]), key=method_order)
    return ours, [stated[stated["method"] == method].drop_duplicates(x) for method in methods]


def published_oom(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose published cell says that it does not fit."""
    return rows[rows["published_fits"].isin([False])]


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
        handles.append(Line2D([], [], **OURS_OOM, color="#555555"))
        labels.append("OOM: does not fit")
    if published and len(published_oom(rows)):
        handles.append(Line2D([], [], **PUBLISHED_OOM, color="#555555"))
        labels.append("OOM, published")
    return handles, labels
