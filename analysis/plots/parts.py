"""What every picture needs: its panels, its caption, the names of what was run."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.captions import caption
from analysis.compare import method_order

# (name of the file, title, caption, figure)
Drawn = tuple[str, str, str, Figure]


def panels_of_figure(count: int, height: float, columns: int = 3) -> tuple[Figure, list[Axes]]:
    columns = min(columns, count)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(style.WIDTH, height * lines + 0.4),
        layout="constrained",
        squeeze=False,
    )
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def text_of(rows: pd.DataFrame) -> str:
    return caption(rows, published=bool(rows["published"].notna().any()))


def variants(rows: pd.DataFrame) -> list[str]:
    """Our variants in the order of the paper's methods, the plainest first."""
    run = rows[rows["device_label"].notna()]
    names = dict.fromkeys(zip(run["method"], run["variant"], strict=True))
    ordered = sorted(names, key=lambda pair: (method_order(pair[0]), len(pair[1]), pair[1]))
    return [variant for _, variant in ordered]


def models_of(rows: pd.DataFrame) -> str:
    run = rows[rows["device_label"].notna()]
    return ", ".join(dict.fromkeys(run["model"].dropna()))
