"""The memory pass on a CPU: live tensor bytes, and beside them the worker's peak resident set."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from streambp.bench.memory.live import LiveReading, Step, track_step
from streambp.bench.memory.rss import RssPeak
from streambp.bench.memory.state import state_bytes
from streambp.bench.step import BACKWARD, FORWARD, Batch

__all__ = ["activation_peak_bytes", "measure_cpu"]

_NO_GPU = "no GPU in this run: memory of a CPU is live tensor bytes and the resident set size"
_RSS_NOTES = {
    "sampled": "peak_rss_bytes was sampled (this system refuses to reset the high-water mark)",
    "lifetime": "peak_rss_bytes is of the worker since its start (no /proc here)",
}


def measure_cpu(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    step: Step,
    *,
    timeline: bool = False,
) -> tuple[dict[str, Any], list[str], dict[str, Any] | None]:
    """Run ``step`` once under the live tracker; the peak before it doesn't count.

    Returns the record's ``memory`` section, notes for the record, and the timeline if asked for.
    """
    gc.collect()
    before = state_bytes(model, optimizer)
    with RssPeak() as rss:
        live = track_step(model, batch, optimizer, step, timeline=timeline)
    assert rss.reading is not None
    memory = {
        **before,
        **live_fields(live),
        "activation_peak_bytes": activation_peak_bytes(live.peak_by_phase_bytes, before),
        "peak_rss_bytes": rss.reading.peak_rss_bytes,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "nvml_process_bytes": None,
        "nvml_device_bytes": None,
        "unavailable": dict.fromkeys(
            (
                "peak_allocated_bytes",
                "peak_reserved_bytes",
                "nvml_process_bytes",
                "nvml_device_bytes",
            ),
            _NO_GPU,
        ),
    }
    note = _RSS_NOTES.get(rss.reading.how)
    return memory, [note] if note else [], live.timeline


def live_fields(live: LiveReading) -> dict[str, Any]:
    """The fields of the record's ``memory`` section that the live tracker fills."""
    return {
        "peak_live_bytes": live.peak_live_bytes,
        "peak_by_phase_bytes": live.peak_by_phase_bytes,
        "peak_by_category_bytes": live.peak_by_category_bytes,
        "peak_phase": live.peak_phase,
        "peak_largest": live.peak_largest,
    }


def activation_peak_bytes(peak_by_phase_bytes: dict[str, int], before: dict[str, int]) -> int:
    """Peak of forward and backward over the weights, gradients and optimizer states before them."""
    peak = max(peak_by_phase_bytes[FORWARD], peak_by_phase_bytes[BACKWARD])
    return peak - sum(before.values())
