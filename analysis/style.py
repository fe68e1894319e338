"""How every picture looks: colours that the colour-blind can tell apart, a marker per method."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's palette; the same colour and marker for a method in every picture.
METHODS = {
    "standard": ("#D55E00", "s"),
    "checkpointing": ("#0072B2", "^"),
    "mst": ("#CC79A7", "D"),
    "streambp": ("#009E73", "o"),
}
_OTHERS = (("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"))
# Categories of a memory timeline from the bottom up, each with its colour (Paul Tol's muted set).
CATEGORIES = {
    "weights": ("weights", "#BBBBBB"),
    "gradients": ("gradients", "#888888"),
    "optimizer": ("optimizer states", "#555555"),
    "inputs": ("inputs", "#DDDDDD"),
    "saved_inputs": ("saved layer inputs", "#332288"),
    "kv": ("keys and values", "#88CCEE"),
    "kv_grads": ("gradients of keys and values", "#44AA99"),
    "saved_attention": ("saved attention", "#117733"),
    "hidden_grads": ("gradients of hidden states", "#999933"),
    "weight_grad_buffers": ("weight gradient buffers", "#DDCC77"),
    "activations": ("activations", "#CC6677"),
    "logits": ("logits", "#882255"),
    "workspaces": ("kernel workspaces", "#AA4499"),
    "other": ("other", "#EEEEEE"),
}
AROUND = "around"  # marks the title and the caption of a figure
WIDTH = 7.2  # inches: the text width of a paper
_LEGEND_WIDTH = 48  # characters of a line of a legend's entry
CAPTION_WIDTH = 118  # characters at the caption's size
_SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "streambp",  # the same picture twice is the same file
}


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib with the project's settings, within the block only."""
    with plt.rc_context(_SETTINGS):
        yield


def method_style(name: str, others: Sequence[str] = ()) -> tuple[str, str]:
    """(colour, marker) of a method; one not known takes its place among `others`."""
    if name in METHODS:
        return METHODS[name]
    rest = [other for other in others if other not in METHODS]
    return _OTHERS[rest.index(name) % len(_OTHERS) if name in rest else 0]


def tokens(axis: Any) -> None:
    """Label an axis of sequence lengths as 512, 20k."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


def thousands(value: float) -> str:
    """20000 as "20k", 512 as "512"."""
    return f"{value / 1000:g}k" if value >= 1000 and value % 50 == 0 else f"{value:g}"


def finish(figure: Figure, title: str, caption: str, *, legend: Any = None) -> Figure:
    """Title above, legend and the caption below the panels, nothing on top of anything.

    legend: (handles, labels) of the whole figure.
    """
    heading = figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    heading.set_gid(AROUND)
    characters = int(CAPTION_WIDTH * figure.get_figwidth() / WIDTH)
    text = textwrap.fill(caption, characters)
    height = figure.get_figheight()
    caption_share = (0.145 * (text.count("\n") + 1) + 0.08) / height
    legend_share = 0.0
    if legend and legend[0]:
        labels = [textwrap.fill(label, _LEGEND_WIDTH) for label in legend[1]]
        drawn = figure.legend(
            legend[0],
            labels,
            loc="lower center",
            bbox_to_anchor=(0.5, caption_share),
            ncols=legend_columns(labels, characters),
            columnspacing=1.6,
            handlelength=2.4,
            borderaxespad=0.2,
        )
        legend_share = drawn.get_window_extent().height / figure.dpi / height + 0.04 / height
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, caption_share + legend_share, 1, 1 - caption_share - legend_share))
    below = figure.text(0.01, 0.06 / height, text, fontsize=7.5, color="#444444", va="bottom")
    below.set_gid(AROUND)
    return figure


def bare(figure: Figure) -> Figure:
    """The figure with its title and caption hidden, for a page that has them as its own text."""
    for text in figure.findobj(lambda artist: artist.get_gid() == AROUND):
        text.set_visible(False)
    return figure


def legend_columns(labels: Sequence[str], characters: int) -> int:
    """How many legend entries stand side by side."""
    longest = max((len(line) for label in labels for line in label.splitlines()), default=1) + 9
    return max(1, min(len(labels), characters // longest))


def save(figure: Figure, path: Path, suffixes: Sequence[str] = ("png", "svg", "pdf")) -> list[Path]:
    """Write the figure in every format; `path` has no suffix. The figure is closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = []
    with styled():
        for suffix in suffixes:
            files.append(path.with_name(f"{path.name}.{suffix}"))
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
            figure.savefig(files[-1], metadata=metadata)
    plt.close(figure)
    return files
