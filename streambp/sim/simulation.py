"""The peak memory of a run on a GPU: from the full model, or exactly from two shorter ones.

Every phase of a step (see `phases.py`) reaches its peak in the same place whatever the depth, so
its live bytes are an affine function of the number of layers. Two short depths determine it; the
largest phase of the extrapolated ones is the peak. Extrapolating the total peak itself would be
wrong: which phase is the largest changes with depth.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from streambp.sim.costs import CostCounter, Costs
from streambp.sim.passes import Pass, resident_events, run_pass
from streambp.sim.roofline import Roofline
from streambp.sim.tracker import Block, LiveTensor, Peak
from streambp.sim.unroll import unrolled
from streambp.sim.workload import Workload, depth_of, with_num_layers


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated memory of one forward and backward pass.

    `largest` lists the largest tensors alive at the peak; where the peak was extrapolated
    (`num_layers_run` below the model's depth), those of the deeper of the two runs. `blocks` holds
    every allocation and release of the whole model, if asked for.
    """

    peak_bytes: int
    peak_phase: str
    peak_op: str
    by_category: dict[str, int]
    resident_by_category: dict[str, int]
    largest: list[LiveTensor] = field(default_factory=list)
    phase_peaks: dict[str, int] = field(default_factory=dict)
    num_layers_run: int
    num_ops: int  # of the whole model, loops over chunks shortened
    costs: Costs | None = None
    blocks: list[Block] | None = None

    @property
    def resident_bytes(self) -> int:
        """What exists before the pass: weights, gradients, optimizer states, inputs, workspaces."""
        return sum(self.resident_by_category.values())


def simulate(
    workload: Workload,
    *,
    full: bool = False,
    roofline: Roofline | None = None,
    record_events: bool = False,
) -> Simulation:
    """Simulate a workload's memory and, given a roofline, its FLOPs and predicted time.

    full: run every layer instead of extrapolating in depth; the answer is the same.
    record_events: fill `blocks`; they stay None where the middle layers differ in what they do.

    Raises:
        SimulationError, ValueError: see `run_pass`.
    """
    depth = depth_of(workload.model, workload.tuning)
    pair = None if full else depth.short_pair()

    def run(cell: Workload, record_events: bool = record_events) -> Pass:
        costs = None if roofline is None else CostCounter(roofline)
        return run_pass(cell, period=depth.period, costs=costs, record_events=record_events)

    if pair is None:
        return _of_pass(run(workload), depth.num_layers)
    first, second = (
        workload.replace(model=with_num_layers(workload.model, num_layers)) for num_layers in pair
    )
    shorter, longer = run(first, record_events=False), run(second)
    num_steps = (depth.num_layers - pair[1]) // depth.period
    simulation = _extrapolated(shorter, longer, num_steps, pair[1])
    if longer.blocks is None:
        return simulation
    blocks = unrolled(
        longer.blocks,
        resident_events(workload),
        num_layers=depth.num_layers,
        period=depth.period,
    )
    return dataclasses.replace(simulation, blocks=blocks)


def _of_pass(result: Pass, num_layers: int) -> Simulation:
    tracker = result.tracker
    peak = tracker.peak
    return Simulation(
        peak_bytes=peak.live_bytes,
        peak_phase=tracker.peak_phase,
        peak_op=peak.op,
        by_category=dict(peak.by_category),
        resident_by_category=result.resident_by_category,
        largest=list(peak.largest),
        phase_peaks={name: p.live_bytes for name, p in tracker.peaks.items()},
        num_layers_run=num_layers,
        num_ops=tracker.num_ops,
        costs=None if result.costs is None else result.costs.totals(),
        blocks=result.blocks,
    )


def _extrapolated(shorter: Pass, longer: Pass, num_steps: int, num_layers: int) -> Simulation:
    """`num_steps`: how many times the difference of the two is still to be added to the longer."""

    def extend(a: int, b: int) -> int:
        return b + num_steps * (b - a)

    def extend_each(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        names = sorted({*a, *b})
        values = {name: extend(a.get(name, 0), b.get(name, 0)) for name in names}
        return {name: value for name, value in values.items() if value}

    costs = None
    if shorter.costs is not None and longer.costs is not None:
        costs = shorter.costs.totals().extended(longer.costs.totals(), num_steps)
    short_peaks, long_peaks = _peaks(shorter), _peaks(longer)
    phase_peaks = {
        name: extend(short_peaks[name].live_bytes, peak.live_bytes)
        for name, peak in long_peaks.items()
    }
    phase = max(phase_peaks, key=lambda name: phase_peaks[name])
    return Simulation(
        peak_bytes=phase_peaks[phase],
        peak_phase=phase,
        peak_op=long_peaks[phase].op,
        by_category=extend_each(short_peaks[phase].by_category, long_peaks[phase].by_category),
        resident_by_category=extend_each(shorter.resident_by_category, longer.resident_by_category),
        largest=list(long_peaks[phase].largest),
        phase_peaks=phase_peaks,
        num_layers_run=num_layers,
        num_ops=extend(shorter.tracker.num_ops, longer.tracker.num_ops),
        costs=costs,
    )


def _peaks(result: Pass) -> dict[str, Peak]:
    assert result.tracker.peak is not None  # takes the last phase's snapshot
    return result.tracker.peaks
