"""Records as one table for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from streambp.bench.records import RunRecord

GIB = 2**30
_STATUS_STYLE = {"ok": "green", "oom": "yellow", "error": "bold red", "killed": "bold red"}
# One peak per device: what its own instrument calls the peak.
_PEAK_FIELDS = ("peak_allocated_bytes", "peak_live_bytes")


def peak_bytes(record: RunRecord) -> int | None:
    """Peak memory of a record: allocated (cuda, simulated) or live tensor bytes (cpu)."""
    memory = record.memory or {}
    return next((memory[name] for name in _PEAK_FIELDS if memory.get(name) is not None), None)


def median_s(record: RunRecord, name: str) -> float | None:
    """Median of the samples `time[name_s_samples]`, None when there are none."""
    samples = (record.time or {}).get(f"{name}_s_samples")
    return statistics.median(samples) if samples else None


def gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.3f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _losses(record: RunRecord) -> str:
    losses = (record.training or {}).get("loss_per_step") or []
    if not losses:
        return "-"
    ends = losses if len(losses) == 1 else (losses[0], losses[-1])
    return " → ".join("-" if loss is None else f"{loss:.4f}" for loss in ends)


def largest(record: RunRecord) -> str:
    """What a maximum search found: the value, its limit where all fits, "nothing", or "-"."""
    if not record.search:
        return "-"
    if record.search["outcome"] == "everything_fits":
        return f"{record.search['largest']:,} or more"
    return "nothing" if record.search["largest"] is None else f"{record.search['largest']:,}"


#: Columns of numbers: header and text. A column in which no run has a value is left out.
_COLUMNS: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
    ("loss", _losses),
    ("largest", largest),
    ("peak\nGiB", lambda record: gib(peak_bytes(record))),
    ("activations\nGiB", lambda record: gib((record.memory or {}).get("activation_peak_bytes"))),
    ("forward\ns", lambda record: seconds(median_s(record, "forward_time"))),
    ("backward\ns", lambda record: seconds(median_s(record, "backward_time"))),
    ("both\ns", lambda record: seconds(median_s(record, "forward_backward_time"))),
)


def record_table(records: Sequence[RunRecord]) -> Table:
    """One row per run. What differs has a column; what all runs share is in `heading`."""
    _, varying = _settings(records)
    table = Table()
    for name in varying:
        table.add_column(name)
    table.add_column("status")
    columns = [
        (header, texts)
        for header, text in _COLUMNS
        if set(texts := [text(record) for record in records]) != {"-"}
    ]
    for header, _ in columns:
        table.add_column(header, justify="left" if header == "loss" else "right")
    for index, record in enumerate(records):
        table.add_row(
            *(str(_setting(record, name)) for name in varying),
            Text(record.status, style=_STATUS_STYLE[record.status]),
            *(texts[index] for _, texts in columns),
        )
    return table


def heading(records: Sequence[RunRecord]) -> str:
    """What all runs share."""
    return ", ".join(_settings(records)[0])


def has_numbers(record: RunRecord) -> bool:
    """Whether a table has anything to say of a run but its status."""
    return any(text(record) != "-" for _, text in _COLUMNS)


_SETTINGS = ("model", "method", "seq_len", "batch_size", "tuning", "dtype", "device", "data")


def _setting(record: RunRecord, name: str) -> Any:
    value = record.config.get(name)
    if record.search and name == record.search["parameter"]:
        return "searched"
    gpu = (record.memory or {}).get("gpu")
    if gpu and isinstance(value, dict) and name in ("device", "data"):
        return f"{value['name']} {gpu['name']}" if name == "device" else None  # it reads no data
    if not isinstance(value, dict):
        return value
    if name != "method":
        return value.get("name")
    options = [
        key if option is True else f"{key}={option}"
        for key, option in value.items()
        if key not in ("name", "options") and option not in (None, False, "none")
    ]
    return " ".join([value["name"], *options])


def _settings(records: Sequence[RunRecord]) -> tuple[list[str], list[str]]:
    shared, varying = [], []
    for name in _SETTINGS:
        values = {str(_setting(record, name)) for record in records} - {"None"}
        if not values:
            continue
        if name == "method" or len(values) > 1:
            varying.append(name)
        else:
            value = values.pop()
            shared.append(f"{name} {value}" if name in ("seq_len", "batch_size") else value)
    return shared, varying


def remarks(records: Sequence[RunRecord]) -> list[str]:
    """How the numbers came to be and what they are; whether the methods' losses agree."""
    lines = []
    for number in ("memory", "time"):
        kinds = sorted({str(p) for r in records if (p := r.provenance.get(number))})
        if kinds:
            lines.append(f"{number}: {', '.join(kinds)}")
    if any(record.search for record in records):
        lines.append("largest: what fits; peak: there")
    else:
        lines.append("peak: of one training step; activations: what forward and backward add")
    agreement = loss_agreement(records)
    if agreement is not None:
        lines.append(f"largest relative difference of the methods' losses: {agreement:.1e}")
    return lines


def loss_agreement(records: Sequence[RunRecord]) -> float | None:
    """Largest relative difference, at any step, between runs that differ only in the method."""
    groups: dict[str, list[list[float]]] = {}
    for record in records:
        losses = (record.training or {}).get("loss_per_step")
        if record.status == "ok" and losses and None not in losses:
            rest = {k: v for k, v in record.config.items() if k not in ("method", "measure")}
            groups.setdefault(repr(sorted(rest.items(), key=str)), []).append(losses)
    differences = [
        (max(step) - min(step)) / max(abs(max(step, key=abs)), 1e-30)
        for group in groups.values()
        if len(group) > 1
        for step in zip(*group, strict=False)
    ]
    return max(differences) if differences else None
