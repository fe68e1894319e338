"""The memory pass on a GPU: the caching allocator's peaks, and NVML's view beside them.

Four numbers that are never mixed: *allocated* (bytes of live tensors, rounded up by the
allocator), *reserved* (what the allocator holds of the device), *process* and *device* (NVML).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from streambp.bench.memory.cpu import activation_peak_bytes
from streambp.bench.memory.live import Step
from streambp.bench.memory.nvml import read_nvml
from streambp.bench.memory.state import state_bytes

__all__ = ["CudaAllocator", "limit_budget", "measure_cuda"]


class CudaAllocator:
    """Peaks of the caching allocator of one device. ``cuda`` is ``torch.cuda`` or a stand-in."""

    def __init__(self, index: int, cuda: Any = torch.cuda):
        self._index = index
        self._cuda = cuda
        self._allocated: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    def reset(self) -> None:
        """Forget all peaks and hand cached blocks back: nothing of an earlier run counts."""
        gc.collect()
        self._cuda.synchronize(self._index)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._index)
        self._allocated, self._reserved = {}, {}

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Keep the peaks of the block under ``phase``, even if the block runs out of memory."""
        self._cuda.reset_peak_memory_stats(self._index)
        try:
            yield
        finally:
            self._cuda.synchronize(self._index)
            for peaks, read in (
                (self._allocated, self._cuda.max_memory_allocated),
                (self._reserved, self._cuda.max_memory_reserved),
            ):
                peaks[phase] = max(peaks.get(phase, 0), read(self._index))

    @property
    def peak_by_phase_bytes(self) -> dict[str, int]:
        """Peak allocated bytes of each phase."""
        return dict(self._allocated)

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest of all phases since ``reset``."""
        return max(self._allocated.values())

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest of all phases since ``reset``."""
        return max(self._reserved.values())


def measure_cuda(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: Step,
    *,
    index: int,
    cuda: Any = torch.cuda,
) -> dict[str, Any]:
    """Run ``step`` once and read the allocator; peaks before it don't count.

    Returns the record's ``memory`` section. NVML is read right after the step, when the process
    still holds all that the allocator reserved.
    """
    allocator = CudaAllocator(index, cuda)
    before = state_bytes(model, optimizer)
    allocator.reset()
    step(allocator.around)
    nvml = read_nvml(index, uuid=_uuid(index, cuda))
    peaks = allocator.peak_by_phase_bytes
    no_tracker = "the allocator doesn't name tensors; measure.timeline=true adds a tracked pass"
    return {
        **before,
        "peak_allocated_bytes": allocator.peak_allocated_bytes,
        "peak_reserved_bytes": allocator.peak_reserved_bytes,
        "peak_by_phase_bytes": peaks,
        "peak_phase": max(peaks, key=lambda phase: peaks[phase]),
        "activation_peak_bytes": activation_peak_bytes(peaks, before),
        "nvml_process_bytes": nvml.process_bytes,
        "nvml_device_bytes": nvml.device_bytes,
        "peak_live_bytes": None,
        "peak_by_category_bytes": None,
        "peak_largest": None,
        "peak_rss_bytes": None,
        "unavailable": {
            **{f"nvml_{field}": reason for field, reason in nvml.unavailable.items()},
            "peak_live_bytes": no_tracker,
            "peak_by_category_bytes": no_tracker,
            "peak_largest": no_tracker,
            "peak_rss_bytes": "the run is on a GPU",
        },
    }


def limit_budget(budget_gib: float, index: int, cuda: Any = torch.cuda) -> None:
    """Let the allocator reserve at most ``budget_gib`` of the device, as a smaller card would.

    ``ValueError`` when the device has less than that.
    """
    total_bytes = cuda.get_device_properties(index).total_memory
    budget_bytes = budget_gib * 2**30
    if budget_bytes > total_bytes:
        raise ValueError(
            f"budget_gib={budget_gib:g}: GPU {index} has {total_bytes / 2**30:.2f} GiB; "
            "lower budget_gib, or budget_gib=null for all of it"
        )
    cuda.set_per_process_memory_fraction(budget_bytes / total_bytes, index)


def _uuid(index: int, cuda: Any) -> str | None:
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
