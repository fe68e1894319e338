"""Grouped bars: ours solid, the published ones hatched beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import style
from analysis.compare import ANSWERED, method_order
from analysis.plots.parts import variants


def draw_bars(axes: Axes, rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Grouped bars, a group per setting, ours solid and the published ones hatched beside.

    Wants the limits of the y axis set. Returns the labels of the series.
    """
    run = rows[rows["device_label"].notna()]
    settings = list(dict.fromkeys(run[list(keys)].itertuples(index=False, name=None)))
    series: list[tuple[str, str | None]] = []
    for method in sorted(dict.fromkeys(run["method"]), key=method_order):
        own = rows[rows["method"] == method]
        if own["published"].notna().any():
            series.append((method, None))
        series += [(method, variant) for variant in variants(own)]
    width = 0.84 / len(series)
    for index, (method, variant) in enumerate(series):
        colour, _ = style.method_style(method)
        for place, setting in enumerate(settings):
            same = np.logical_and.reduce(
                [rows[key] == value for key, value in zip(keys, setting, strict=True)]
            )
            own = rows[same & (rows["method"] == method)]
            value, label = _bar_value(own, variant)
            x = place - 0.42 + width * (index + 0.5)
            if value is not None:
                axes.bar(
                    x,
                    value,
                    width * 0.92,
                    facecolor=colour if variant else "white",
                    edgecolor=colour,
                    hatch=None if variant else "////",
                    linewidth=0.9,
                )
            axes.annotate(
                label,
                (x, value or axes.get_ylim()[0]),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90 if len(series) * len(settings) > 6 else 0,
                fontsize=7,
                color="#333333" if value is not None else colour,
            )
    labels = [", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in s) for s in settings]
    axes.set_xticks(range(len(settings)), labels)
    axes.set_xlim(-0.6, len(settings) - 0.4)
    axes.grid(axis="x", visible=False)
    return [_series_label(rows, method, variant) for method, variant in series]


def _bar_value(own: pd.DataFrame, variant: str | None) -> tuple[float | None, str]:
    """(height or None, what is written above) of one bar; variant None: the published one."""
    if variant is None:
        stated = own[own["published_fits"].isin([True, False])]
        if stated.empty:
            return None, ""
        value = stated["published"].iloc[0]
        return (None, "OOM") if value != value else (float(value), f"{value:,.0f}")
    found = own[(own["variant"] == variant) & own["device_label"].notna()]
    if found.empty:
        return None, ""
    row = found.iloc[0]
    if row["cell"] not in ANSWERED or row["ours"] != row["ours"]:
        return None, {"nothing_fits": "none fits", "oom": "OOM"}.get(row["cell"], row["cell"])
    bound = "≥ " if row["cell"] == "lower_bound" else ""
    return float(row["ours"]), f"{bound}{row['ours']:,.0f}"


def _series_label(rows: pd.DataFrame, method: str, variant: str | None) -> str:
    if variant is None:
        return f"{method}, published"
    kinds = sorted(set(rows.loc[rows["variant"] == variant, "provenance"].dropna()))
    return f"{variant}, {' / '.join(kinds)}" if kinds else variant


def bar_legend(labels: Sequence[str]) -> tuple[list[Any], list[str]]:
    handles = []
    for label in labels:
        colour, _ = style.method_style(label.split(" (")[0].split(",")[0])
        published = label.endswith(", published")
        handles.append(
            plt.Rectangle(
                (0, 0),
                1,
                1,
                facecolor="white" if published else colour,
                edgecolor=colour,
                hatch="////" if published else None,
            )
        )
    return handles, list(labels)
