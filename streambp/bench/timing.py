"""The timing pass: clocks around the phases of real steps, and nothing else.

It runs apart from the memory pass, because the trackers of that one slow every operator down.
Warm-up steps are run and thrown away; every sample that is kept is kept raw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from streambp.bench.step import BACKWARD, FORWARD, Batch
from streambp.bench.training import OPTIMIZER, Trainer

__all__ = ["CpuClock", "CudaClock", "time_steps"]


class CpuClock:
    """Wall time of blocks by ``time.perf_counter``: operators on a CPU return when done."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._samples: list[tuple[str, float]] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        start = self._now()
        yield
        self._samples.append((name, self._now() - start))

    def take(self) -> list[tuple[str, float]]:
        """The (name, seconds) measured since the last call, in order."""
        samples, self._samples = self._samples, []
        return samples


class CudaClock:
    """Device time of blocks by CUDA events. Starts from an idle device and waits before reading.

    ``cuda`` is ``torch.cuda`` or a stand-in.
    """

    def __init__(self, index: int, cuda: Any = torch.cuda):
        self._index = index
        self._cuda = cuda
        self._pending: list[tuple[str, Any, Any]] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        if not self._pending:
            self._cuda.synchronize(self._index)
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._pending.append((name, start, end))

    def take(self) -> list[tuple[str, float]]:
        """The (name, seconds) measured since the last call, in order."""
        self._cuda.synchronize(self._index)
        samples = [(name, start.elapsed_time(end) / 1e3) for name, start, end in self._pending]
        self._pending = []
        return samples


def time_steps(
    trainer: Trainer,
    batches: Sequence[Batch],
    clock: CpuClock | CudaClock,
    *,
    num_samples: int,
    warmup_steps: int,
    progress: Callable[[int, float], None] = lambda sample, seconds: None,
) -> dict[str, Any]:
    """Time ``num_samples`` whole optimizer steps after ``warmup_steps`` untimed ones.

    ``batches``: the micro-batches of every step. ``progress(sample, seconds)`` follows along.

    Returns the record's ``time`` section: one forward, backward and forward+backward sample for
    each micro-batch; one sample of the whole step and of the optimizer for each step.
    """
    for _ in range(warmup_steps):
        trainer.step(batches)
    passes: dict[str, list[float]] = {FORWARD: [], BACKWARD: [], OPTIMIZER: []}
    steps: list[float] = []
    for sample in range(num_samples):
        trainer.step(batches, clock.around)
        taken = clock.take()
        for name, seconds in taken:
            passes[name].append(seconds)
        steps.append(sum(seconds for _, seconds in taken))
        progress(sample, steps[-1])
    return {
        "forward_time_s_samples": passes[FORWARD],
        "backward_time_s_samples": passes[BACKWARD],
        "forward_backward_time_s_samples": [
            forward + backward
            for forward, backward in zip(passes[FORWARD], passes[BACKWARD], strict=True)
        ],
        "optimizer_time_s_samples": passes[OPTIMIZER],
        "step_time_s_samples": steps,
        "warmup_steps": warmup_steps,
    }
