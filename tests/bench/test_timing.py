"""Clocks and the timing pass: what is timed, what is thrown away, what is kept raw."""

import pytest

from streambp.bench.config import OptimizerConfig
from streambp.bench.timing import CpuClock, CudaClock, time_steps
from streambp.bench.training import Trainer


def test_cpu_clock_keeps_raw_samples_in_order():
    ticks = iter([0.0, 1.0, 10.0, 12.5])
    clock = CpuClock(now=lambda: next(ticks))
    with clock.around("forward"):
        pass
    with clock.around("backward"):
        pass
    assert clock.take() == [("forward", 1.0), ("backward", 2.5)]
    assert clock.take() == []


class FakeCuda:
    """Work is queued; an event gets its time only when the device reaches it."""

    def __init__(self):
        self.now_ms = 0.0
        self.queue = []
        self.log = []

    def launch(self, milliseconds):
        self.queue.append(milliseconds)

    def synchronize(self, index):
        self.log.append("synchronize")
        for item in self.queue:
            if isinstance(item, float):
                self.now_ms += item
            else:
                item.at_ms = self.now_ms
        self.queue = []

    def Event(self, enable_timing):
        assert enable_timing
        cuda = self

        class Event:
            at_ms = None

            def record(self):
                cuda.log.append("record")
                cuda.queue.append(self)

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

        return Event()


def test_cuda_clock_waits_before_and_after_and_converts_milliseconds():
    cuda = FakeCuda()
    clock = CudaClock(0, cuda)
    cuda.launch(500.0)  # earlier work, which isn't to be timed
    with clock.around("forward"):
        cuda.launch(20.0)
    with clock.around("backward"):
        cuda.launch(40.0)
    assert clock.take() == [("forward", 0.020), ("backward", 0.040)]
    assert cuda.log == ["synchronize", *["record"] * 4, "synchronize"]
    assert clock.take() == []


@pytest.mark.parametrize("optimizer", ["adamw", "none"])
def test_samples_of_every_kind_without_warmup(tiny_model, tiny_batch, optimizer):
    ticks = iter(range(10_000))
    steps = []

    class Counting(Trainer):
        def step(self, *args, **kwargs):
            steps.append(1)
            return super().step(*args, **kwargs)

    trainer = Counting(tiny_model, OptimizerConfig(name=optimizer))
    told = []
    section = time_steps(
        trainer,
        [tiny_batch, tiny_batch],
        CpuClock(now=lambda: float(next(ticks))),
        num_samples=3,
        warmup_steps=2,
        progress=lambda sample, seconds: told.append((sample, seconds)),
    )
    assert len(steps) == 5
    assert section == {
        "forward_time_s_samples": [1.0] * 6,
        "backward_time_s_samples": [1.0] * 6,
        "forward_backward_time_s_samples": [2.0] * 6,
        "optimizer_time_s_samples": [1.0] * 3,
        "step_time_s_samples": [5.0] * 3,
        "warmup_steps": 2,
    }
    assert told == [(0, 5.0), (1, 5.0), (2, 5.0)]
