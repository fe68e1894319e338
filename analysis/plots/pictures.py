"""The pictures of each experiment, one per device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.compare import ANSWERED, Context, comparison, contexts, within
from analysis.plots.chunks import ablation, linear_example
from analysis.plots.longest import max_seq_len
from analysis.plots.memory import memory
from analysis.plots.parts import Drawn
from analysis.plots.timing import batch, time
from analysis.timeline import timeline_figures
from streambp.bench import paper
from streambp.bench.records import RunRecord

_Builder = Callable[[pd.DataFrame, Context], list[Drawn]]
_BUILDERS: dict[str, _Builder] = {
    "bp_memory_figure": memory,
    "max_seq_len_table": max_seq_len,
    "bp_time_table": time,
    "batch_table": batch,
    "linear_example": linear_example,
    "other_models": memory,
    "chunk_size_ablation": ablation,
}


@dataclass(frozen=True)
class Picture:
    """A figure that is ready to be saved under `name`."""

    name: str
    title: str
    caption: str
    figure: Figure = field(repr=False, compare=False)


def plots(found: Iterable[RunRecord], experiment: str) -> list[Picture]:
    """The pictures of one experiment, none without numbers.

    Raises:
        ValueError: not one of the paper's experiments.
    """
    if experiment not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise ValueError(f"experiment={experiment!r}: not one of the paper's. Fix: one of {known}")
    numbers = comparison(found, experiment)
    pictures = []
    for index, context in enumerate(contexts(numbers)):
        rows = within(numbers, context)
        run = rows[rows["device_label"].notna()]
        if not (run["ours"].notna() & run["cell"].isin(ANSWERED)).any():
            continue
        with style.styled():
            for name, title, text, figure in _BUILDERS[experiment](rows, context):
                suffix = f"_{index + 1}" if index else ""
                pictures.append(Picture(f"{name}{suffix}", title, text, figure))
    return pictures


def write(found: Sequence[RunRecord], out: Path) -> list[Path]:
    """Write every picture, and a timeline for each run that stored one, below `out`."""
    files = []
    for experiment in paper.EXPERIMENTS:
        for picture in plots(found, experiment):
            files += style.save(picture.figure, out / picture.name)
    for record, figure in timeline_figures(found):
        files += style.save(figure, out / f"timeline_{record.job}")
    return files
