"""Live tensor bytes of one training step by category and phase, at the storage level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streambp.bench.memory.state import optimizer_tensors
from streambp.bench.step import Batch
from streambp.sim.tracker import LiveTracker, register_model

__all__ = ["LiveReading", "track_step"]

#: Runs one step; the argument is the ``around`` of ``forward_backward``.
Step = Callable[[Callable[[str], Any]], Any]


@dataclass(kw_only=True, frozen=True)
class LiveReading:
    """Live bytes at the peak of one step, and what they consisted of.

    ``peak_by_phase_bytes``: the highest of each phase. ``peak_by_category_bytes`` sums to
    ``peak_live_bytes``. ``peak_largest``: the largest tensors at the peak.
    """

    peak_live_bytes: int
    peak_by_phase_bytes: dict[str, int]
    peak_by_category_bytes: dict[str, int]
    peak_phase: str
    peak_largest: list[dict[str, Any]]
    timeline: dict[str, Any] | None


def track_step(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    step: Step,
    *,
    round_to: int = 1,
    timeline: bool = False,
) -> LiveReading:
    """Run ``step`` and count the storages alive in it, weights and resident state included.

    ``step(around)`` must enclose its phases in ``around(name)``. ``round_to`` rounds storages up
    as an allocator would (512 for CUDA). Tensors neither registered here nor labelled by the
    library count as "activations". Memory inside an operator's own kernel isn't seen.
    """
    tracker = LiveTracker(round_to=round_to, timeline=timeline)
    with register_model(tracker, model):
        for tensor in optimizer_tensors(optimizer):
            tracker.register(tensor, "optimizer")
        for name, tensor in batch.items():
            tracker.register(tensor, "inputs", name)
        tracker.reset_peak()

        @contextmanager
        def around(name: str) -> Iterator[None]:
            tracker.phase = name
            yield

        with tracker:
            step(around)
        reading = LiveReading(
            peak_live_bytes=tracker.peak_bytes,
            peak_by_phase_bytes={
                name: peak.live_bytes for name, peak in tracker.peaks.items() if name != "start"
            },
            peak_by_category_bytes={k: v for k, v in tracker.peak_by_category.items() if v},
            peak_phase=tracker.peak_phase,
            peak_largest=[
                {
                    "name": tensor.name,
                    "bytes": tensor.num_bytes,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "category": tensor.category,
                }
                for tensor in tracker.peak_largest
            ],
            timeline=tracker.timeline.to_dict() if tracker.timeline is not None else None,
        )
    return reading
