"""Thin labelled lines across a panel, each label where it covers nothing that was drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from analysis.load import GIB

_SIDES = ((0.99, "right"), (0.01, "left"), (0.5, "center"))
# Points between a line and its label, negative ones under it, the wanted ones first.
_OVER, _AROUND = (2.0, 6.0, 10.0), (-2.5, 2.0, 12.0, -12.5, 20.0, -20.5)
_LINE_PAD, _MARKER_PAD = 1.0, 5.0  # pixels that stay free around a label


def mark_levels(axes: Axes, rows: pd.DataFrame) -> None:
    """A line at the memory that tensors may have, and one at what is resident in any method.

    Wants the panel in its place and its limits set: the labels go where there is room.
    """
    budgets = rows["budget_bytes"].dropna().unique()
    resident = (rows["weights_bytes"] + rows["gradients_bytes"]).dropna().unique()
    levels = []
    if len(budgets) == 1:
        levels.append((budgets[0] / GIB, f"{budgets[0] / GIB:.1f} GiB usable", "-", True))
    if len(resident) == 1:
        height = resident[0] / GIB
        levels.append((height, f"weights, gradients {height:.3g} GiB", "--", False))
    for height, _, line, _ in levels:
        axes.axhline(height, color="#999999", linewidth=0.9, linestyle=line, zorder=1)
    drawn: list[Annotation] = []
    for height, text, _, above in levels:
        label = _label(axes, height, text)
        _place(label, axes, above, [other.get_window_extent() for other in drawn])
        drawn.append(label)


def _label(axes: Axes, height: float, text: str) -> Annotation:
    return axes.annotate(
        text,
        (0.99, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=7.5,
        color="#666666",
    )


def _place(label: Annotation, axes: Axes, above: bool, taken: Iterable[Bbox]) -> None:
    """Where it hits least at its line: over it, or on any side of it."""
    taken = list(taken)
    fewest = None
    for away, (x, side) in itertools.product(_OVER if above else _AROUND, _SIDES):
        where: dict[str, Any] = {"ha": side, "va": "bottom" if away > 0 else "top"}
        label.xy = (x, label.xy[1])
        label.set(position=(0, away), **where)
        hit = _hits(label.get_window_extent(), axes, taken)
        if fewest is None or hit < fewest[0]:
            fewest = hit, label.xy, label.get_position(), where
    assert fewest is not None
    label.xy = fewest[1]
    label.set(position=fewest[2], **fewest[3])


def _hits(box: Bbox, axes: Axes, taken: Iterable[Bbox]) -> int:
    """How much of what is drawn a label's box would lie on."""
    frame = axes.get_window_extent()
    hits = sum(box.overlaps(other) for other in taken)
    hits += 10 * (box.y0 < frame.y0 or box.y1 > frame.y1)  # out of the panel is worst
    around_lines, around_markers = box.padded(_LINE_PAD), box.padded(_MARKER_PAD)
    for line in axes.lines:
        path = line.get_transform().transform_path(line.get_path())
        points = np.asarray(path.vertices, dtype=float)
        if line.get_linestyle() != "None" and len(points) > 1:
            hits += bool(path.intersects_bbox(around_lines, filled=False))
        if line.get_marker() not in (None, "None", ""):
            hits += sum(around_markers.contains(x, y) for x, y in points)
    return hits
