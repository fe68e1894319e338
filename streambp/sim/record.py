"""A simulated run as the sections of a record."""

from __future__ import annotations

from typing import Any

from streambp.bench.config import MethodConfig, RunConfig
from streambp.bench.methods import method_options
from streambp.sim.allocator import replay
from streambp.sim.costs import Costs
from streambp.sim.errors import NothingFitsError, SimulationError
from streambp.sim.gpus import DEFAULT_GPU, Gpu, closest_numbers, gpu_names, resolve_gpu
from streambp.sim.passes import run_pass
from streambp.sim.roofline import Roofline
from streambp.sim.settings import Assumptions, paper_assumptions
from streambp.sim.simulation import Simulation, simulate
from streambp.sim.timeline import timeline_of
from streambp.sim.tracker import Block
from streambp.sim.workload import Workload, depth_of

GIB = 2**30
_BASELINE = "checkpointing"
_STATES = ("weights", "gradients", "optimizer")
#: A whole model of at most so many ops is run where short depths don't tell what all layers do.
_WHOLE_MODEL_OPS = 60_000
_NOT_SIMULATED = {
    "peak_rss_bytes": "simulated run: host memory is not used",
    "nvml_process_bytes": "simulated run: there is no device",
    "nvml_device_bytes": "simulated run: there is no device",
}


def simulate_run(config: RunConfig) -> dict[str, Any]:
    """The record's sections of a simulated run: memory, time, flops, timeline, provenance, notes.

    Peak, FLOPs, time, and what came and went (for reserved memory and the timeline) are those of
    the whole model, told from two short depths (see `simulate`). The same of gradient checkpointing
    is under `beside` in each section; where that can't be simulated, a note says why.

    Raises:
        NothingFitsError: the budget is smaller than weights, gradients and optimizer states.
        SimulationError, ValueError: see `run_pass` and `resolve_gpu`.
    """
    workload = workload_of(config)
    assert workload.gpu is not None
    budget_bytes = budget_bytes_of(config, workload)
    roofline = Roofline(gpu=workload.gpu)
    simulation = simulate(workload, roofline=roofline, record_events=True)
    if sum(_states(simulation).values()) > budget_bytes:
        budget = f"of the {budget_bytes / GIB:.2f} that a run may use on {workload.gpu.name}"
        raise NothingFitsError(f"nothing fits: {resident_message(workload)} {budget} (simulated)")
    blocks = _blocks(workload, simulation, whole=bool(config.measure.timeline))
    sections = _numbers(workload, simulation, blocks, budget_bytes)
    notes = _excess_note(workload, simulation, budget_bytes)
    if workload.method != _BASELINE:
        try:
            beside = _baseline_numbers(config, roofline, budget_bytes)
        except (SimulationError, ValueError) as error:
            beside = {}
            notes.append(f"no {_BASELINE} beside it: {error}")
        for name, values in beside.items():
            sections[name]["beside"] = {"method": _BASELINE, **values}
    sections["provenance"] = {"memory": "simulated", "time": "predicted", "flops": "simulated"}
    sections["notes"] = [*notes, *_notes(workload, roofline)]
    if blocks is not None and config.measure.timeline is not False:
        sections["timeline"] = {
            **timeline_of(blocks),
            "provenance": "simulated",
            "gpu": workload.gpu.name,
            "budget_bytes": budget_bytes,
        }
    return sections


def _baseline_numbers(config: RunConfig, roofline: Roofline, budget_bytes: int) -> dict[str, Any]:
    """The same sections of gradient checkpointing."""
    baseline = workload_of(config.replace(method=MethodConfig(name=_BASELINE)))
    simulation = simulate(baseline, roofline=roofline, record_events=True)
    return _numbers(baseline, simulation, _blocks(baseline, simulation), budget_bytes)


def _numbers(
    workload: Workload, simulation: Simulation, blocks: list[Block] | None, budget_bytes: int
) -> dict[str, Any]:
    """The sections memory, time and flops of one simulated workload."""
    assert simulation.costs is not None
    return {
        "memory": _memory(workload, simulation, blocks, budget_bytes),
        "time": _time(simulation.costs),
        "flops": _flops(simulation.costs),
    }


def workload_of(config: RunConfig) -> Workload:
    """What a run's configuration says about memory. `paper=true` takes the paper's assumptions,
    unless `device.assumptions` says otherwise.

    Raises:
        ValueError: an unknown GPU, assumption or method option.
    """
    base = paper_assumptions(config.method.name) if config.paper else Assumptions()
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
        gpu=resolve_gpu(config.gpu or DEFAULT_GPU),
    )


def budget_bytes_of(config: RunConfig, workload: Workload) -> int:
    """Bytes of tensors that may exist: what the GPU has, or `budget_gib`.

    Raises:
        ValueError: `budget_gib` is more than the GPU has.
    """
    assert workload.gpu is not None
    return workload.gpu.budget_bytes(config.budget_gib)


def resident_message(workload: Workload) -> str:
    """What exists before the first token, in words."""
    resident = _states(simulate(workload.replace(seq_len=8, batch_size=1)))
    parts = list(resident)
    total = sum(resident.values())
    names = " and ".join(parts[-2:]) if len(parts) < 3 else "weights, gradients and optimizer"
    alone = f"{names} alone need {total / GIB:.2f} GiB"
    each = ", ".join(f"{name} {resident[name] / GIB:.2f}" for name in parts)
    return f"{alone} ({each})"


def _states(simulation: Simulation) -> dict[str, int]:
    """Resident bytes that no sequence length changes."""
    resident = simulation.resident_by_category
    return {name: resident[name] for name in _STATES if resident.get(name)}


def _excess_note(workload: Workload, simulation: Simulation, budget_bytes: int) -> list[str]:
    """What there is at a peak that does not fit, with the mask that may be most of the inputs."""
    excess = simulation.peak_bytes - budget_bytes
    if excess <= 0:
        return []
    mask = workload.assumptions.mask
    names = {"inputs": "inputs" if mask == "none" else f"inputs and {mask} mask"}
    largest_first = sorted(simulation.by_category.items(), key=lambda item: -item[1])
    categories = ", ".join(
        f"{names.get(name, name.replace('_', ' '))} {num_bytes / GIB:.2f}"
        for name, num_bytes in largest_first[:4]
    )
    note = (
        f"{excess / 2**20:,.1f} MiB too much; the peak of {simulation.peak_bytes / GIB:.2f} GiB is "
        f"{categories}"
    )
    if simulation.largest:
        tensor = simulation.largest[0]
        note += f"; the largest tensor: {tensor.name} {tensor.num_bytes / GIB:.2f}"
    return [note]


def memory_section(workload: Workload, budget_bytes: int) -> dict[str, Any]:
    """The record's memory section of one workload."""
    simulation = simulate(workload, record_events=True)
    return _memory(workload, simulation, _blocks(workload, simulation), budget_bytes)


def _blocks(
    workload: Workload, simulation: Simulation, *, whole: bool = False
) -> list[Block] | None:
    """What came and went. Where short depths don't tell: of the whole model, if that takes seconds
    or `whole` asks for it; else None."""
    if simulation.blocks is None and (whole or simulation.num_ops <= _WHOLE_MODEL_OPS):
        period = depth_of(workload.model, workload.tuning).period
        return run_pass(workload, period=period, record_events=True).blocks
    return simulation.blocks


def _memory(
    workload: Workload, simulation: Simulation, blocks: list[Block] | None, budget_bytes: int
) -> dict[str, Any]:
    assert workload.gpu is not None
    resident = simulation.resident_by_category
    weights, gradients = resident.get("weights", 0), resident.get("gradients", 0)
    optimizer = resident.get("optimizer", 0)
    peak = simulation.peak_bytes
    reserved, missing = _reserved(workload.gpu, blocks)
    return {
        "peak_allocated_bytes": peak,
        **reserved,
        "peak_live_bytes": peak,
        "weights_bytes": weights,
        "gradients_bytes": gradients,
        "optimizer_bytes": optimizer,
        "activation_peak_bytes": peak - weights - gradients - optimizer,
        "resident_by_category_bytes": resident,
        "peak_by_category_bytes": dict(simulation.by_category),
        "peak_by_phase_bytes": dict(simulation.phase_peaks),
        "peak_phase": simulation.peak_phase,
        "peak_op": simulation.peak_op,
        "peak_largest": [
            {
                "name": tensor.name,
                "bytes": tensor.num_bytes,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "category": tensor.category,
            }
            for tensor in simulation.largest
        ],
        **_fit(peak, budget_bytes),
        "gpu": workload.gpu.to_dict(),
        **dict.fromkeys(_NOT_SIMULATED),
        "unavailable": {**_NOT_SIMULATED, **missing},
    }


def _reserved(gpu: Gpu, blocks: list[Block] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Reserved bytes from the whole model's allocations, and why they are missing without."""
    names = (
        "peak_reserved_bytes",
        "peak_reserved_expandable_bytes",
        "out_of_memory_at_event",
        "num_events",
    )
    if blocks is None:
        reason = "the whole model was not run: measure.timeline=true does"
        return dict.fromkeys(names), dict.fromkeys(names, reason)
    events = [event for block in blocks for event in block.events]
    limited = replay(events, capacity_bytes=gpu.memory_bytes, expandable=True)
    missing = {}
    if limited.oom_event is None:
        missing["out_of_memory_at_event"] = "it does not run out of memory"
    values = (
        replay(events).peak_reserved_bytes,
        replay(events, expandable=True).peak_reserved_bytes,
        limited.oom_event,
        len(events),
    )
    return dict(zip(names, values, strict=True)), missing


def _fit(peak_bytes: int, budget_bytes: int) -> dict[str, Any]:
    return {
        "budget_bytes": budget_bytes,
        "fits": peak_bytes <= budget_bytes,
        "headroom_bytes": budget_bytes - peak_bytes,
    }


def _time(costs: Costs) -> dict[str, Any]:
    forward = sum(t for key, t in costs.time_s.items() if key.in_forward)
    total = sum(costs.time_s.values())
    return {
        "forward_time_s_samples": [forward],
        "backward_time_s_samples": [total - forward],
        "forward_backward_time_s_samples": [total],
        "step_time_s_samples": None,
        "warmup_steps": None,
    }


def _flops(costs: Costs) -> dict[str, Any]:
    by_kind = {f"{key.kind}_{key.stage}_flops": 0 for key in costs.flops if key.kind != "other"}
    for key, flops in costs.flops.items():
        if key.kind != "other":
            by_kind[f"{key.kind}_{key.stage}_flops"] += flops
    return {**dict(sorted(by_kind.items())), "total_flops": sum(by_kind.values())}


def _shared_numbers(gpu: Gpu) -> list[str]:
    """Which numbers of an own GPU are a known one's: on a command line, those not given."""
    base, same = closest_numbers(gpu)
    rates = [field for field in same if field != "sm"]
    if not rates or gpu.name.split(" ")[0] in gpu_names():
        return []
    return [f"{gpu.name}: {', '.join('gpu.' + field for field in same)} as {base}"]


def _notes(workload: Workload, roofline: Roofline) -> list[str]:
    assumed = ", ".join(f"{k} {v}".lower() for k, v in workload.assumptions.to_dict().items())
    return [
        f"simulated, not measured: {roofline.gpu.name}",
        *_shared_numbers(roofline.gpu),
        f"assumptions: {assumed}",
        "optimizer states resident, its step is fused and needs no memory of its own",
        f"predicted time: {roofline}",
        "reserved bytes are a model of the caching allocator, uncertain by about 1 GiB",
        "timeline: of the chunks in a loop, the first two and the last two are shown",
    ]
