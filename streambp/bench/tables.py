"""Records as one table for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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


def record_table(records: Sequence[RunRecord]) -> Table:
    """One row per run. What all runs share is in the title; what differs has a column."""
    shared, varying = _settings(records)
    table = Table(title=", ".join(shared), title_justify="left", caption_justify="left")
    for name in varying:
        table.add_column(name)
    table.add_column("status")
    table.add_column("loss")
    for header in ("peak\nGiB", "activations\nGiB", "forward\ns", "backward\ns", "both\ns"):
        table.add_column(header, justify="right")
    for record in records:
        memory = record.memory or {}
        table.add_row(
            *(str(_setting(record, name)) for name in varying),
            Text(record.status, style=_STATUS_STYLE[record.status]),
            _losses(record),
            gib(peak_bytes(record)),
            gib(memory.get("activation_peak_bytes")),
            seconds(median_s(record, "forward_time")),
            seconds(median_s(record, "backward_time")),
            seconds(median_s(record, "forward_backward_time")),
        )
    table.caption = "\n".join(_caption(records))
    return table


_SETTINGS = ("model", "method", "seq_len", "batch_size", "tuning", "dtype", "device", "data")


def _setting(record: RunRecord, name: str) -> Any:
    value = record.config.get(name)
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
        values = {str(_setting(record, name)) for record in records}
        if name == "method" or len(values) > 1:
            varying.append(name)
        else:
            value = values.pop()
            shared.append(f"{name} {value}" if name in ("seq_len", "batch_size") else value)
    return shared, varying


def _caption(records: Sequence[RunRecord]) -> list[str]:
    lines = []
    for number in ("memory", "time"):
        kinds = sorted({str(p) for r in records if (p := r.provenance.get(number))})
        if kinds:
            lines.append(f"{number}: {', '.join(kinds)}")
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
