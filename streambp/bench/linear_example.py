"""The paper's linear example: L = sum((X W1) W2), its backward pass whole or by chunks of rows.

No language model, only the idea: rows are independent, so the gradients of W1 and W2 are sums over
chunks of rows, and what is alive at once shrinks to one chunk's share. A chunk costs a temporary
weight gradient that autograd adds to the sum; many chunks therefore cost time.

Shapes: X (N, W) rows, W1 and W2 (W, W); float32 in the paper, N = 100,000 and W = 16384.

Terms. peak: everything alive, X and the weights included. intermediate peak: the peak less X, the
weights and their gradients (and cuBLAS's workspaces, which stay).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from streambp.bench.config import ConfigError, RunConfig
from streambp.bench.progress import Progress

_UNKNOWN_MEASURED = "not read for the linear example"


@dataclass(frozen=True, kw_only=True)
class Options:
    """`experiment.options` of kind linear_example. num_chunks 1 is the ordinary backward pass."""

    rows: int
    width: int
    num_chunks: int

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Raises ConfigError for a missing, unknown or impossible option."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in [*options, *names]:
            value = options.get(name)
            fix = f"experiment.options.{name}=<whole number above 0>"
            if name not in names:
                fix = f"one of {', '.join(names)}"
                raise ConfigError(f"experiment.options.{name}", value, "no such option", fix)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"experiment.options.{name}", value, "must be at least 1", fix)
        if options["num_chunks"] > options["rows"]:
            raise ConfigError(
                "experiment.options.num_chunks",
                options["num_chunks"],
                f"exceeds the {options['rows']} rows",
                "fewer chunks",
            )
        return cls(**options)

    @property
    def flops(self) -> int:
        """Two products forward, three backward (X needs no gradient)."""
        return 5 * 2 * self.rows * self.width**2


def backward_by_chunks(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    num_chunks: int,
    around: Callable[[str], Any] = lambda name: nullcontext(),
) -> None:
    """Add the gradients of `sum((x @ w1) @ w2)` to `w1.grad` and `w2.grad`.

    x (N, W), w1 and w2 (W, W). Alive beside them: four (N / num_chunks, W) tensors and one weight
    gradient. The gradient of the sum is a tensor of ones, as a matrix product needs it.
    """
    for rows in x.chunk(num_chunks):
        with around("forward"):
            z = (rows @ w1) @ w2
        with around("backward"):
            z.backward(torch.ones_like(z))


def run(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """The record's sections on the run's device."""
    options = Options.parse(config.experiment.options)
    if config.device.name == "simulated":
        return _simulated(config, options)
    return _measured(config, options, progress)


def simulate(options: Options, gpu: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """(tracker, costs) of one pass on tensors without storage. gpu: a `sim.gpus.Gpu` or None."""
    from streambp.sim.costs import CostCounter
    from streambp.sim.fake import fake_mode
    from streambp.sim.roofline import Roofline
    from streambp.sim.tracker import WORKSPACES, LiveTracker
    from streambp.sim.workspaces import cublas_workspace_bytes

    tracker = LiveTracker(round_to=512 if gpu else 1, timeline=True)
    costs = CostCounter(Roofline(gpu=gpu) if gpu else None)
    with fake_mode(), tracker:
        tensors = _tensors(options, torch.device("cpu"), dtype)
        _register(tracker, *tensors)
        kept = []
        for num_bytes in cublas_workspace_bytes(gpu.sm) if gpu else ():
            kept.append(torch.empty(num_bytes, dtype=torch.uint8))
            tracker.register(kept[-1], WORKSPACES, "cuBLAS workspace")

        @contextmanager
        def around(name: str) -> Iterator[None]:
            tracker.phase = name
            with costs.around(name):
                yield

        with costs:
            backward_by_chunks(*tensors, options.num_chunks, around)
    return tracker, costs


def _tensors(
    options: Options, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def weight() -> torch.Tensor:
        values = torch.randn(options.width, options.width, device=device, dtype=dtype)
        return values.div_(options.width**0.5).requires_grad_()

    x = torch.randn(options.rows, options.width, device=device, dtype=dtype)
    return x, weight(), weight()


def _register(tracker: Any, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    tracker.register(x, "inputs", "X")
    tracker.register(w1, "weights", "W1")
    tracker.register(w2, "weights", "W2")


def _base_bytes(options: Options, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of X, the weights and their gradients."""
    weights = 2 * options.width**2 * dtype.itemsize
    inputs = options.rows * options.width * dtype.itemsize
    return {"inputs_bytes": inputs, "weights_bytes": weights, "gradients_bytes": weights}


def _simulated(config: RunConfig, options: Options) -> dict[str, Any]:
    from streambp.sim.gpus import resolve_gpu
    from streambp.sim.roofline import Roofline
    from streambp.sim.workspaces import cublas_workspace_bytes

    gpu = resolve_gpu(config.gpu or "a800_80gb")
    tracker, costs = simulate(options, gpu, getattr(torch, config.dtype))
    base = _base_bytes(options, getattr(torch, config.dtype))
    seconds = sum(costs.time_s.values())
    forward = sum(t for key, t in costs.time_s.items() if key.in_forward)
    usable = gpu.usable_bytes
    workspaces = sum(cublas_workspace_bytes(gpu.sm))  # there before the pass, as X is
    return {
        "memory": {
            **base,
            "peak_allocated_bytes": tracker.peak_bytes,
            "intermediate_peak_bytes": tracker.peak_bytes - sum(base.values()) - workspaces,
            "activation_peak_bytes": tracker.peak_bytes - 2 * base["weights_bytes"],
            "peak_by_category_bytes": {k: v for k, v in tracker.peak_by_category.items() if v},
            "peak_phase": tracker.peak_phase,
            "budget_bytes": usable,
            "fits": tracker.peak_bytes <= usable,
            "headroom_bytes": usable - tracker.peak_bytes,
            "gpu": gpu.to_dict(),
            "unavailable": {},
        },
        "time": {
            "forward_time_s_samples": [forward],
            "backward_time_s_samples": [seconds - forward],
            "forward_backward_time_s_samples": [seconds],
            "warmup_steps": None,
        },
        "flops": {"total_flops": round(sum(costs.flops.values()))},
        "timeline": tracker.timeline.to_dict() if config.measure.timeline else None,
        "provenance": {"memory": "simulated", "time": "predicted", "flops": "simulated"},
        "notes": [
            f"simulated, not measured: {gpu.name}",
            f"predicted time is a roofline with stated efficiencies: {Roofline(gpu=gpu).to_dict()}",
        ],
    }


def _measured(config: RunConfig, options: Options, progress: Progress) -> dict[str, Any]:
    from streambp.bench.devices.targets import check_budget, target_of

    target = target_of(config)
    target.prepare()
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    tensors = _tensors(options, target.device, dtype)
    base = _base_bytes(options, dtype)
    progress.phase("memory")
    memory, timeline = _read_memory(config, options, tensors)
    memory = {
        **base,
        **memory,
        "activation_peak_bytes": memory["peak_bytes"] - 2 * base["weights_bytes"],
        "intermediate_peak_bytes": memory.pop("peak_bytes") - sum(base.values()),
    }
    provenance: dict[str, str | None] = {"memory": "measured", "time": None, "flops": None}
    progress.section("memory", memory)
    progress.section("provenance", provenance)
    check_budget({"peak_live_bytes": None, **memory}, config.budget_gib)
    progress.phase("timing")
    clock = target.clock()
    samples: dict[str, list[float]] = {"forward": [], "backward": []}
    for sample in range(config.measure.warmup_steps + config.measure.timing_samples):
        _drop_gradients(tensors)
        backward_by_chunks(*tensors, options.num_chunks, clock.around)
        taken = clock.take()
        if sample >= config.measure.warmup_steps:
            for name, values in samples.items():
                values.append(sum(seconds for phase, seconds in taken if phase == name))
    sections: dict[str, Any] = {"memory": memory, "provenance": provenance}
    if samples["forward"]:
        both = [sum(pair) for pair in zip(samples["forward"], samples["backward"], strict=True)]
        sections["time"] = {
            "forward_time_s_samples": samples["forward"],
            "backward_time_s_samples": samples["backward"],
            "forward_backward_time_s_samples": both,
            "warmup_steps": config.measure.warmup_steps,
        }
        sections["provenance"] = {**provenance, "time": "measured"}
    if timeline is not None:
        sections["timeline"] = timeline
    return sections


def _drop_gradients(tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _read_memory(
    config: RunConfig, options: Options, tensors: tuple[torch.Tensor, ...]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Memory fields of one pass, with the peak once more as `peak_bytes`; and the timeline."""
    x, w1, w2 = tensors
    if config.device.name == "cuda":
        from streambp.bench.memory.cuda import CudaAllocator

        allocator = CudaAllocator(config.device.index)
        allocator.reset()
        with allocator.around("all"):
            backward_by_chunks(x, w1, w2, options.num_chunks)
        peak = allocator.peak_allocated_bytes
        fields: dict[str, Any] = {
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": allocator.peak_reserved_bytes,
            "peak_bytes": peak,
            "unavailable": {"peak_live_bytes": _UNKNOWN_MEASURED},
        }
        return fields, None
    from streambp.sim.tracker import LiveTracker

    tracker = LiveTracker(timeline=bool(config.measure.timeline))
    _register(tracker, x, w1, w2)

    @contextmanager
    def around(name: str) -> Iterator[None]:
        tracker.phase = name
        yield

    with tracker:
        backward_by_chunks(x, w1, w2, options.num_chunks, around)
    timeline = tracker.timeline.to_dict() if tracker.timeline is not None else None
    fields = {
        "peak_live_bytes": tracker.peak_bytes,
        "peak_by_category_bytes": {k: v for k, v in tracker.peak_by_category.items() if v},
        "peak_phase": tracker.peak_phase,
        "peak_bytes": tracker.peak_bytes,
        "peak_allocated_bytes": None,
        "unavailable": {"peak_allocated_bytes": "no GPU in this run"},
    }
    return fields, timeline
