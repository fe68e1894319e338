"""A simulated run as the sections of a record."""

from __future__ import annotations

from typing import Any

from streambp.bench.config import RunConfig
from streambp.bench.methods import method_options
from streambp.sim.allocator import replay
from streambp.sim.costs import CostCounter
from streambp.sim.errors import NothingFitsError
from streambp.sim.gpus import resolve_gpu
from streambp.sim.passes import Pass, run_pass
from streambp.sim.roofline import Roofline
from streambp.sim.settings import PAPER, Assumptions
from streambp.sim.simulation import simulate
from streambp.sim.workload import Workload, depth_of

GIB = 2**30
_BASELINE = "checkpointing"
_NOT_SIMULATED = {
    "peak_rss_bytes": "simulated run: host memory is not used",
    "nvml_process_bytes": "simulated run: there is no device",
    "nvml_device_bytes": "simulated run: there is no device",
}


def simulate_run(config: RunConfig) -> dict[str, Any]:
    """The record's sections of a simulated run: memory, time, flops, timeline, provenance, notes.

    The whole model runs on tensors without storage; of long loops over chunks only the chunks that
    decide the peak. Gradient checkpointing of the same workload is simulated beside it.

    Raises:
        NothingFitsError: the budget is smaller than what exists before the first token.
        SimulationError, ValueError: see `run_pass` and `resolve_gpu`.
    """
    workload = workload_of(config)
    assert workload.gpu is not None
    budget_bytes = budget_bytes_of(config, workload)
    roofline = Roofline(gpu=workload.gpu)
    costs = CostCounter(roofline)
    result = run_pass(
        workload,
        period=depth_of(workload.model).period,
        costs=costs,
        record_events=True,
        timeline=config.measure.timeline,
    )
    if sum(result.resident_by_category.values()) > budget_bytes:
        raise NothingFitsError(f"nothing fits: {resident_message(workload)}")
    sections: dict[str, Any] = {
        "memory": _memory(workload, result, budget_bytes),
        "time": _time(costs),
        "flops": _flops(costs),
        "provenance": {"memory": "simulated", "time": "predicted", "flops": "simulated"},
        "notes": _notes(workload, roofline),
    }
    if workload.method != _BASELINE:
        sections["memory"]["beside"] = _beside(workload, budget_bytes)
    if result.tracker.timeline is not None:
        sections["timeline"] = {
            **result.tracker.timeline.to_dict(),
            "provenance": "simulated",
            "gpu": workload.gpu.name,
            "budget_bytes": budget_bytes,
        }
    return sections


def workload_of(config: RunConfig) -> Workload:
    """What a run's configuration says about memory. `paper=true` takes the paper's assumptions,
    unless `device.assumptions` says otherwise.

    Raises:
        ValueError: an unknown GPU, assumption or method option.
    """
    base = PAPER if config.paper else Assumptions()
    assumptions = Assumptions.from_mapping({**base.to_dict(), **config.device.assumptions})
    return Workload(
        model=config.model,
        method=config.method.name,
        method_options=method_options(config.method),
        tuning=config.tuning,
        objective=config.objective.name,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        dtype="bfloat16" if config.dtype == "auto" else config.dtype,
        optimizer=config.optimizer.name,
        optimizer_state_dtype=config.optimizer.state_dtype,
        assumptions=assumptions,
        gpu=resolve_gpu(config.gpu or "a100_80gb"),
    )


def budget_bytes_of(config: RunConfig, workload: Workload) -> int:
    """Bytes of tensors that may exist: what the GPU has, or `budget_gib` if that is less."""
    assert workload.gpu is not None
    usable = workload.gpu.usable_bytes
    return usable if config.budget_gib is None else min(usable, int(config.budget_gib * GIB))


def resident_message(workload: Workload) -> str:
    """What exists before the first token, in words."""
    resident = simulate(workload.replace(seq_len=8, batch_size=1)).resident_by_category
    parts = [name for name in ("weights", "gradients", "optimizer") if resident.get(name)]
    total = sum(resident[name] for name in parts)
    names = " and ".join(parts[-2:]) if len(parts) < 3 else "weights, gradients and optimizer"
    alone = f"{names} alone need {total / GIB:.2f} GiB"
    each = ", ".join(f"{name} {resident[name] / GIB:.2f}" for name in parts)
    return f"{alone} ({each})"


def memory_section(workload: Workload, budget_bytes: int) -> dict[str, Any]:
    """The record's memory section of one workload, from a full simulation."""
    period = depth_of(workload.model).period
    return _memory(workload, run_pass(workload, period=period, record_events=True), budget_bytes)


def _memory(workload: Workload, result: Pass, budget_bytes: int) -> dict[str, Any]:
    tracker = result.tracker
    peak = tracker.peak
    assert workload.gpu is not None and tracker.events is not None
    native = replay(tracker.events)
    expandable = replay(tracker.events, expandable=True)
    limited = replay(tracker.events, capacity_bytes=workload.gpu.memory_bytes, expandable=True)
    resident = result.resident_by_category
    weights, gradients = resident.get("weights", 0), resident.get("gradients", 0)
    optimizer = resident.get("optimizer", 0)
    return {
        "peak_allocated_bytes": peak.live_bytes,
        "peak_reserved_bytes": native.peak_reserved_bytes,
        "peak_reserved_expandable_bytes": expandable.peak_reserved_bytes,
        "out_of_memory_at_event": limited.oom_event,
        "peak_live_bytes": peak.live_bytes,
        "weights_bytes": weights,
        "gradients_bytes": gradients,
        "optimizer_bytes": optimizer,
        "activation_peak_bytes": peak.live_bytes - weights - gradients - optimizer,
        "resident_by_category_bytes": resident,
        "peak_by_category_bytes": dict(peak.by_category),
        "peak_by_phase_bytes": {name: p.live_bytes for name, p in tracker.peaks.items()},
        "peak_phase": tracker.peak_phase,
        "peak_op": peak.op,
        "peak_largest": [
            {
                "name": tensor.name,
                "bytes": tensor.num_bytes,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "category": tensor.category,
            }
            for tensor in peak.largest
        ],
        **_fit(peak.live_bytes, budget_bytes),
        "gpu": workload.gpu.to_dict(),
        **dict.fromkeys(_NOT_SIMULATED),
        "unavailable": dict(_NOT_SIMULATED),
    }


def _fit(peak_bytes: int, budget_bytes: int) -> dict[str, Any]:
    return {
        "budget_bytes": budget_bytes,
        "fits": peak_bytes <= budget_bytes,
        "headroom_bytes": budget_bytes - peak_bytes,
    }


def _beside(workload: Workload, budget_bytes: int) -> dict[str, Any]:
    """The same workload under gradient checkpointing."""
    baseline = simulate(workload.replace(method=_BASELINE, method_options={}))
    return {
        "method": _BASELINE,
        "peak_allocated_bytes": baseline.peak_bytes,
        "peak_phase": baseline.peak_phase,
        "peak_by_category_bytes": baseline.by_category,
        **_fit(baseline.peak_bytes, budget_bytes),
    }


def _time(costs: CostCounter) -> dict[str, Any]:
    forward = sum(t for key, t in costs.time_s.items() if key.in_forward)
    total = sum(costs.time_s.values())
    return {
        "forward_time_s_samples": [forward],
        "backward_time_s_samples": [total - forward],
        "forward_backward_time_s_samples": [total],
        "step_time_s_samples": None,
        "warmup_steps": None,
    }


def _flops(costs: CostCounter) -> dict[str, Any]:
    by_kind = {f"{key.kind}_{key.stage}_flops": 0 for key in costs.flops if key.kind != "other"}
    for key, flops in costs.flops.items():
        if key.kind != "other":
            by_kind[f"{key.kind}_{key.stage}_flops"] += round(flops)
    return {**dict(sorted(by_kind.items())), "total_flops": sum(by_kind.values())}


def _notes(workload: Workload, roofline: Roofline) -> list[str]:
    return [
        f"simulated, not measured: {workload.gpu.name if workload.gpu else 'cpu'}",
        f"assumptions: {workload.assumptions.to_dict()}",
        "optimizer states resident, its step is fused and needs no memory of its own",
        f"predicted time is a roofline with stated efficiencies: {roofline.to_dict()}",
        "reserved bytes are a model of the caching allocator, uncertain by about 1 GiB",
    ]
