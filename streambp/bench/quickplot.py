"""The picture at the end of a sweep: memory and time of each method, from records only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streambp.bench.records import RunRecord
from streambp.bench.tables import GIB, median_s, peak_bytes

# Colour-blind safe (Okabe-Ito), and a marker each so that the picture also works in grey.
_STYLES = {
    "standard": ("#D55E00", "s"),
    "checkpointing": ("#0072B2", "^"),
    "streambp": ("#009E73", "o"),
}
_OTHER_STYLES = (("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"))

Value = Callable[[RunRecord], float | None]


def save_plot(records: Sequence[RunRecord], path: Path) -> Path:
    """Draw memory and time over sequence length, a line per method (bars at a single length).

    Runs that ran out of memory are marked at the top of the memory panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    _panel(left, records, _peak_gib, "Peak memory (GiB)")
    _mark_out_of_memory(left, records)
    _panel(right, records, _time_s, "Forward + backward (s)")
    handles, labels = left.get_legend_handles_labels()
    left.legend(handles, labels, frameon=False, loc="upper left")
    figure.suptitle(_title(records), fontsize=10)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".png")
    os.close(handle)
    figure.savefig(temporary, dpi=150)
    plt.close(figure)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    return path


def _peak_gib(record: RunRecord) -> float | None:
    value = peak_bytes(record) if record.status == "ok" else None
    return None if value is None else value / GIB


def _time_s(record: RunRecord) -> float | None:
    return median_s(record, "forward_backward_time") if record.status == "ok" else None


def _label(record: RunRecord) -> str:
    method = record.config["method"]
    kept = [name for name in ("keep_kv", "keep_attention") if method.get(name)]
    size = [f"chunk {method['chunk_size']}"] if method.get("chunk_size") else []
    model = record.config["model"]["name"]
    return (
        f"{method['name']} ({', '.join([model, *size, *kept])})" if size or kept else method["name"]
    )


def _lines(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Records by line of the plot: method with its options, and model where several differ."""
    models = {record.config["model"]["name"] for record in records}
    lines: dict[str, list[RunRecord]] = {}
    for record in records:
        label = _label(record)
        if len(models) > 1:
            label = f"{record.config['model']['name']}, {label}"
        lines.setdefault(label, []).append(record)
    return {
        label: sorted(found, key=lambda record: record.config["seq_len"])
        for label, found in lines.items()
    }


def _style(index: int, records: Sequence[RunRecord]) -> tuple[str, str]:
    name = records[0].config["method"]["name"]
    return _STYLES.get(name, _OTHER_STYLES[index % len(_OTHER_STYLES)])


def _panel(axes: Any, records: Sequence[RunRecord], value: Value, title: str) -> None:
    lines = _lines(records)
    lengths = sorted({record.config["seq_len"] for record in records})
    for index, (label, found) in enumerate(lines.items()):
        points = [(r.config["seq_len"], v) for r in found if (v := value(r)) is not None]
        colour, marker = _style(index, found)
        if len(lengths) == 1:
            bars = axes.bar([index], [points[0][1] if points else 0], color=colour, label=label)
            axes.bar_label(bars, labels=[f"{points[0][1]:.3g}" if points else "none"])
        else:
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                color=colour,
                marker=marker,
                markersize=6,
                linewidth=1.8,
                label=label,
            )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    if len(lengths) == 1:
        axes.set_xticks(range(len(lines)), ["" for _ in lines])
        axes.margins(y=0.15)
        axes.set_xlabel(f"at {lengths[0]} tokens")
    else:
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel("Sequence length (tokens)")


def _mark_out_of_memory(axes: Any, records: Sequence[RunRecord]) -> None:
    for index, found in enumerate(_lines(records).values()):
        colour, _ = _style(index, found)
        for record in found:
            if record.status == "oom":
                top = axes.get_ylim()[1]
                axes.annotate(
                    "OOM", (record.config["seq_len"], top), color=colour, ha="center", va="top"
                )


def _title(records: Sequence[RunRecord]) -> str:
    configs = [record.config for record in records]

    def shared(values: set[str]) -> str:
        return values.pop() if len(values) == 1 else "several"

    kinds = sorted(
        {str(p) for r in records for n in ("memory", "time") if (p := r.provenance.get(n))}
    )
    parts = [
        shared({config["model"]["name"] for config in configs}),
        f"device {shared({config['device']['name'] for config in configs})}",
        shared({config["dtype"] for config in configs}),
        f"batch {shared({str(config['batch_size']) for config in configs})}",
        " and ".join(kinds),
    ]
    return ", ".join(part for part in parts if part)
