"""The picture at the end of a sweep: memory and time of each method, from records only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streambp.bench.records import RunRecord
from streambp.bench.tables import GIB, median_s, peak_bytes
from streambp.sim.gpus import DEFAULT_GPU

# Colour-blind safe (Okabe-Ito), and a marker each so that the picture also works in grey.
_STYLES = {
    "standard": ("#D55E00", "s"),
    "checkpointing": ("#0072B2", "^"),
    "streambp": ("#009E73", "o"),
}
_OTHER_STYLES = (("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"))

Value = Callable[[RunRecord], float | None]
Lines = dict[str, list[RunRecord]]  # label -> records by sequence length


def save_plot(records: Sequence[RunRecord], path: Path) -> Path:
    """Draw memory and time over sequence length, a line per method (bars at a single length).

    A dotted line is what is resident in any method (weights, gradients, optimizer states); a run
    that ran out of memory is marked at the top of the memory panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = _lines(records)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.4), layout="constrained")
    _panel(left, lines, _peak_gib, "Peak memory (GiB)")
    _mark_resident(left, records)
    _mark_out_of_memory(left, lines)
    _panel(right, lines, _time_s, "Forward + backward (s)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(_title(records), fontsize=10, x=0.01, ha="left")
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".png")
    os.close(handle)
    try:
        figure.savefig(temporary, dpi=150)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        plt.close(figure)
        Path(temporary).unlink(missing_ok=True)
    return path


def _peak_gib(record: RunRecord) -> float | None:
    value = peak_bytes(record) if record.status == "ok" else None
    return None if value is None else value / GIB


def _time_s(record: RunRecord) -> float | None:
    return median_s(record, "forward_backward_time") if record.status == "ok" else None


def _label(record: RunRecord) -> str:
    method = record.config["method"]
    switches = ("keep_kv", "keep_attention", "recompute_head", "split_sums")
    options = [name for name in switches if method.get(name)]
    if method.get("chunk_size"):
        options.insert(0, f"chunk {method['chunk_size']}")
    return f"{method['name']} ({', '.join(options)})" if options else method["name"]


def _lines(records: Sequence[RunRecord]) -> Lines:
    """Records by line of the plot: method with its options, and model where several differ."""
    models = {record.config["model"]["name"] for record in records}
    order = list(_STYLES)
    lines: Lines = {}
    for record in sorted(records, key=lambda record: record.config["seq_len"]):
        label = _label(record)
        if len(models) > 1:
            label = f"{record.config['model']['name']}, {label}"
        lines.setdefault(label, []).append(record)

    def place(item: tuple[str, list[RunRecord]]) -> tuple[int, str]:
        name = item[1][0].config["method"]["name"]
        return (order.index(name) if name in order else len(order), item[0])

    return dict(sorted(lines.items(), key=place))


def _style(index: int, records: Sequence[RunRecord]) -> tuple[str, str]:
    name = records[0].config["method"]["name"]
    return _STYLES.get(name, _OTHER_STYLES[index % len(_OTHER_STYLES)])


def _panel(axes: Any, lines: Lines, value: Value, title: str) -> None:
    lengths = sorted({record.config["seq_len"] for found in lines.values() for record in found})
    for index, (label, found) in enumerate(lines.items()):
        points = [(r.config["seq_len"], v) for r in found if (v := value(r)) is not None]
        colour, marker = _style(index, found)
        if len(lengths) == 1:
            bars = axes.bar([index], [points[0][1] if points else 0], color=colour, label=label)
            axes.bar_label(bars, labels=[f"{points[0][1]:.3g}" if points else found[0].status])
        else:
            lengths_and_values = zip(*points, strict=True) if points else ([], [])
            axes.plot(
                *lengths_and_values,
                color=colour,
                marker=marker,
                markersize=6,
                linewidth=1.8,
                label=label,
            )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    if len(lengths) == 1:
        axes.set_xticks(range(len(lines)), ["" for _ in lines])
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel(f"at {lengths[0]:,} tokens")
    else:
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("Sequence length (tokens)")


def _mark_resident(axes: Any, records: Sequence[RunRecord]) -> None:
    """A dotted line at what all runs hold before the pass, where they agree on it."""
    names = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    memories = [record.memory for record in records if record.memory and record.status == "ok"]
    totals = {sum(memory.get(name) or 0 for name in names) for memory in memories}
    if len(totals) == 1 and (total := totals.pop()):
        label = "weights, gradients, optimizer"
        axes.axhline(total / GIB, color="#555555", linestyle=":", linewidth=1.4, label=label)


def _mark_out_of_memory(axes: Any, lines: Lines) -> None:
    top = axes.get_ylim()[1]
    for index, found in enumerate(lines.values()):
        colour, _ = _style(index, found)
        for record in found:
            if record.status == "oom":
                place = (record.config["seq_len"], top)
                axes.annotate("OOM", place, color=colour, ha="center", va="top", weight="bold")


def _device(record: RunRecord) -> str:
    """The device; of a simulated run, the GPU that was simulated."""
    name: str = record.config["device"]["name"]
    if name != "simulated":
        return name
    gpu = (record.memory or {}).get("gpu") or record.config.get("gpu") or {"name": DEFAULT_GPU}
    return f"a simulated {gpu['name']}"


def _tuning(config: dict[str, Any]) -> str:
    """What trains, where that is not everything."""
    tuning = config.get("tuning") or {}
    return f"LoRA of rank {tuning['rank']}" if tuning.get("name") == "lora" else ""


def _title(records: Sequence[RunRecord]) -> str:
    configs = [record.config for record in records]

    def shared(values: set[str]) -> str:
        return values.pop() if len(values) == 1 else "several"

    numbers = {
        f"{name} {kind}"
        for record in records
        for name in ("memory", "time")
        if (kind := record.provenance.get(name))
    }
    parts = [
        shared({config["model"]["name"] for config in configs}),
        f"on {shared({_device(record) for record in records})}",
        shared({_tuning(config) for config in configs}),
        shared({config["dtype"] for config in configs}),
        f"batch {shared({str(config['batch_size']) for config in configs})}",
        *sorted(numbers),
    ]
    return ", ".join(part for part in parts if part)
