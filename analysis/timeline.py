"""Live memory by category over one forward and backward pass, like the paper's figures 1 and 8.

For any run with `measure.timeline=true`, simulated or measured. `python -m analysis.timeline
<run folder> -o <file without suffix>` draws one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.captions import caption
from analysis.load import GIB, frame, timeline, variant
from streambp.bench.folders import TIMELINE_NAME
from streambp.bench.records import RecordError, RunRecord

_SHARE = 0.004  # categories that never reach this share of the peak are drawn as "other"
_PHASES = ("forward", "backward", "optimizer")


def timeline_figure(record: RunRecord) -> Figure:
    """The stacked areas of a run's timeline, with its phases and its peak marked.

    Raises:
        FileNotFoundError, ValueError: see `analysis.load.timeline`.
    """
    return timelines_figure([record])


def timeline_figures(found: Iterable[RunRecord]) -> Iterator[tuple[RunRecord, Figure]]:
    """Each run that stored a timeline, and its figure; a file that is none is skipped with a
    warning that names it."""
    for record in found:
        if record.path is None or not (record.path.parent / TIMELINE_NAME).exists():
            continue
        try:
            yield record, timeline_figure(record)
        except ValueError as error:
            warnings.warn(f"skipped {error}")


def timelines_figure(found: Sequence[RunRecord]) -> Figure:
    """Timelines of several runs below each other, on one scale, so that they compare."""
    values = [_of_the_pass(timeline(record)) for record in found]
    highest = max(max(one["live_bytes"]) for one in values)
    kept = _kept_categories(values)
    with style.styled():
        figure, grid = plt.subplots(
            len(found),
            1,
            figsize=(style.WIDTH, 2.5 * len(found) + 1.7),
            layout="constrained",
            squeeze=False,
        )
        for axes, record, one in zip(grid.flat, found, values, strict=True):
            _stack(axes, one, kept)
            axes.set_ylim(0, highest / GIB * 1.22)
            axes.set_title(_heading(record), loc="left")
            axes.set_ylabel("Live memory (GiB)")
            style.tokens(axes.xaxis)
        grid.flat[-1].set_xlabel("Progress of the pass (operations)")
        rows = frame(found)
        text = caption(rows)
        handles = [
            plt.Rectangle((0, 0), 1, 1, facecolor=_colour(name), edgecolor="none")
            for name in reversed(kept)
        ]
        labels = [_label(name, values) for name in reversed(kept)]
        title = "Live memory by category over one forward and backward pass"
        return style.finish(figure, title, text, legend=(handles, labels))


def _of_the_pass(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a timeline that lies in its phases; what a simulation sets up before is cut."""
    phases = values["phase"]
    kept = [i for i, phase in enumerate(phases) if phase.split("/")[0] in _PHASES]
    if not kept:
        return dict(values)
    part = slice(kept[0], kept[-1] + 1)
    cut = {name: values[name][part] for name in ("phase", "live_bytes")}
    if values.get("op_index"):
        ops = values["op_index"][part]
        cut["op_index"] = [op - ops[0] for op in ops]
    columns = values["by_category_bytes"].items()
    return {**cut, "by_category_bytes": {name: column[part] for name, column in columns}}


def _heading(record: RunRecord) -> str:
    config = record.config
    kind = record.provenance.get("memory") or "unknown provenance"
    if (config.get("experiment") or {}).get("kind") == "linear_example":
        options = config["experiment"].get("options") or {}
        return f"linear example, {options.get('num_chunks')} chunks ({kind})"
    length = f"T = {config['seq_len']:,}"
    return f"{config['model']['name']}, {variant(config['method'])}, {length} ({kind})"


def _kept_categories(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Categories large enough to be seen, from the bottom up, and "other" for the rest."""
    highest = max(max(one["live_bytes"]) for one in values)
    names = {name for one in values for name in one["by_category_bytes"]}
    large = {
        name
        for name in names
        if max(max(one["by_category_bytes"].get(name, [0])) for one in values) >= _SHARE * highest
    }
    known = [name for name in style.CATEGORIES if name in large and name != "other"]
    unknown = sorted(large - set(style.CATEGORIES))
    rest = names - large - {"other"}
    return [*known, *unknown, *(["other"] if rest or "other" in names else [])]


def _stack(axes: Axes, values: Mapping[str, Any], kept: Sequence[str]) -> None:
    x = np.asarray(values.get("op_index") or range(len(values["live_bytes"])), dtype=float)
    columns = {
        name: np.asarray(column) / GIB for name, column in values["by_category_bytes"].items()
    }
    zero = np.zeros(len(x))
    layers = [columns.get(name, zero) for name in kept if name != "other"]
    if "other" in kept:
        layers.append(sum((c for name, c in columns.items() if name not in kept), zero))
    colours = [_colour(name) for name in kept]
    axes.stackplot(x, *layers, colors=colours, step="post", linewidth=0)
    live = np.asarray(values["live_bytes"]) / GIB
    axes.step(x, live, where="post", color="#222222", linewidth=0.7)
    axes.set_xlim(x[0], x[-1])
    axes.grid(axis="x", visible=False)
    _mark_phases(axes, x, values["phase"])
    peak = int(np.argmax(live))
    right = x[peak] > (x[0] + x[-1]) / 2
    axes.plot(x[peak], live[peak], marker="v", color="#222222", markersize=5, clip_on=False)
    axes.annotate(
        f"peak {live[peak]:.2f} GiB" if live[peak] >= 1 else f"peak {live[peak]:.4f} GiB",
        (x[peak], live[peak]),
        xytext=(-7 if right else 7, 4),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8.5,
    )


def _mark_phases(axes: Axes, x: np.ndarray, phases: Sequence[str]) -> None:
    """Names of forward, backward and optimizer along the top, a line where each begins."""
    names = [phase.split("/")[0] for phase in phases]
    starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    span = x[-1] - x[0] or 1.0
    for start, end in zip(starts, [*starts[1:], len(x) - 1], strict=True):
        if start:
            axes.axvline(x[start], color="#222222", linewidth=0.7, linestyle=(0, (4, 3)))
        name = names[start]
        if name in _PHASES and (x[end] - x[start]) / span > 0.08:
            axes.annotate(
                name,
                ((x[start] + x[end]) / 2, 0.985),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="top",
                fontsize=8.5,
                color="#444444",
            )


def _colour(name: str) -> str:
    return style.CATEGORIES.get(name, ("", "#F0E442"))[1]


def _label(name: str, values: Sequence[Mapping[str, Any]]) -> str:
    return style.CATEGORIES.get(name, (name.replace("_", " "), ""))[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.timeline", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders, drawn below each other")
    parser.add_argument("-o", "--out", type=Path, default=Path("timeline"), help="without a suffix")
    options = parser.parse_args(arguments)
    try:
        figure = timelines_figure([RunRecord.load(folder) for folder in options.runs])
        files = style.save(figure, options.out)
    except (OSError, ValueError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
