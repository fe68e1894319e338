"""What differs between a CPU and a GPU in a measured run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from streambp.bench.config import RunConfig
from streambp.bench.memory import (
    OverBudgetError,
    limit_budget,
    measure_cpu,
    measure_cuda,
    track_step,
)
from streambp.bench.memory.cpu import live_fields
from streambp.bench.memory.live import Step
from streambp.bench.step import Batch
from streambp.bench.timing import CpuClock, CudaClock

__all__ = ["CpuTarget", "CudaTarget", "MemoryPass", "Target", "check_budget", "target_of"]

CUDA_ROUNDING_BYTES = 512


@dataclass(kw_only=True)
class MemoryPass:
    """``memory`` goes into the record as it is, ``timeline`` into its own file."""

    memory: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    timeline: dict[str, Any] | None = None


class Target(Protocol):
    """A device that runs the real program."""

    @property
    def device(self) -> torch.device: ...
    def prepare(self) -> None:
        """Thread count or memory budget, before anything is on the device."""

    def memory_pass(
        self, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None, step: Step
    ) -> MemoryPass:
        """Run ``step`` under this device's instruments."""
        ...

    def clock(self) -> CpuClock | CudaClock:
        """The clock of this device."""
        ...


class CpuTarget:
    """The CPU. A budget can't be enforced while a pass runs, so it is checked after it."""

    device = torch.device("cpu")

    def __init__(self, cfg: RunConfig):
        self._cfg = cfg

    def prepare(self) -> None:
        """Set torch's thread count, if one is configured."""
        if self._cfg.device.num_threads is not None:
            torch.set_num_threads(self._cfg.device.num_threads)

    def memory_pass(
        self, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None, step: Step
    ) -> MemoryPass:
        """Live tensor bytes and peak RSS."""
        memory, notes, timeline = measure_cpu(
            model, batch, optimizer, step, timeline=bool(self._cfg.measure.timeline)
        )
        return MemoryPass(memory=memory, notes=notes, timeline=timeline)

    def clock(self) -> CpuClock:
        """Wall time."""
        return CpuClock()


class CudaTarget:
    """One GPU, its allocator limited to ``budget_gib`` from the start."""

    def __init__(self, cfg: RunConfig, cuda: Any = torch.cuda):
        self._cfg = cfg
        self._index = cfg.device.index
        self._cuda = cuda
        self.device = torch.device("cuda", self._index)

    def prepare(self) -> None:
        """Make the GPU current and limit its allocator to the budget."""
        self._cuda.set_device(self._index)
        if self._cfg.budget_gib is not None:
            limit_budget(self._cfg.budget_gib, self._index, self._cuda)

    def memory_pass(
        self, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None, step: Step
    ) -> MemoryPass:
        """Allocator peaks and NVML; a second, tracked pass for categories when a timeline is asked
        for, since the tracker would not change the peaks but the allocator can't name them."""
        memory = measure_cuda(model, optimizer, step, index=self._index, cuda=self._cuda)
        if not self._cfg.measure.timeline:
            return MemoryPass(memory=memory)
        live = track_step(
            model, batch, optimizer, step, round_to=CUDA_ROUNDING_BYTES, timeline=True
        )
        fields = live_fields(live)
        memory["unavailable"] = {
            name: reason for name, reason in memory["unavailable"].items() if name not in fields
        }
        phases = {name: memory[name] for name in ("peak_by_phase_bytes", "peak_phase")}
        return MemoryPass(memory={**memory, **fields, **phases}, timeline=live.timeline)

    def clock(self) -> CudaClock:
        """CUDA events."""
        return CudaClock(self._index, self._cuda)


def target_of(cfg: RunConfig) -> CpuTarget | CudaTarget:
    """The target that ``cfg.device.name`` names."""
    return CudaTarget(cfg) if cfg.device.name == "cuda" else CpuTarget(cfg)


def check_budget(memory: dict[str, Any], budget_gib: float | None) -> None:
    """``OverBudgetError`` when the CPU's live peak exceeds the budget."""
    if budget_gib is None or memory["peak_live_bytes"] is None:
        return
    budget_bytes = int(budget_gib * 2**30)
    if memory["peak_live_bytes"] > budget_bytes:
        raise OverBudgetError(memory["peak_live_bytes"], budget_bytes)
