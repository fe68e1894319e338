"""The largest sequence length or batch size that fits, on any device.

One search serves all devices. It keeps a bracket: a value that fits and one that does not. Where
a probe tells its peak even beyond the budget (simulated, or on a CPU), the next value is where a
straight line through the bracket's ends meets the budget; else (on a GPU) it doubles until
something does not fit and then halves the bracket. It ends when the bracket is one step wide, so
the answer and its successor have both been tried. Only out of memory counts as not fitting; other
failures propagate.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from streambp.bench.config import ConfigError, RunConfig
from streambp.bench.progress import Progress
from streambp.bench.units import size_text

PARAMETERS = {"max_seq_len": "seq_len", "max_batch_size": "batch_size"}
FOUND, NOTHING_FITS, EVERYTHING_FITS = "found", "nothing_fits", "everything_fits"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One value tried. `peak_bytes` is None where the device could not say."""

    value: int
    fits: bool
    peak_bytes: int | None = None


@dataclass(kw_only=True)
class SearchResult:
    """`largest` fits, `smallest_failing` (one step more) does not; None where there is none.

    outcome: "found"; "nothing_fits" (not even the smallest value); "everything_fits" (all values
    up to the limit do, the answer is a lower bound).
    """

    outcome: str
    largest: int | None
    smallest_failing: int | None
    probes: list[Probe] = field(default_factory=list)

    @property
    def answer(self) -> Probe | None:
        """The probe of `largest`."""
        return next((p for p in self.probes if p.value == self.largest), None)


def find_max(
    try_value: Callable[[int], Probe],
    *,
    budget_bytes: int | None,
    step: int,
    start: int,
    limit: int,
) -> SearchResult:
    """The largest multiple of `step` up to `limit` that fits.

    try_value: runs one probe. budget_bytes: what `peak_bytes` is compared with to choose the next
    value; None: doubling and halving only. start: where to begin; any value will do.
    """
    probes: dict[int, Probe] = {}

    def probe(multiple: int) -> bool:
        if multiple not in probes:
            probes[multiple] = try_value(multiple * step)
        return probes[multiple].fits

    def result(outcome: str, largest: int | None, failing: int | None) -> SearchResult:
        return SearchResult(
            outcome=outcome,
            largest=None if largest is None else largest * step,
            smallest_failing=None if failing is None else failing * step,
            probes=list(probes.values()),
        )

    last = limit // step
    fitting, failing = 0, last + 1  # 0 and last + 1 are not probed: nothing there to try
    candidate = min(max(start // step, 1), last)
    while failing - fitting > 1:
        if probe(candidate):
            fitting = candidate
        else:
            failing = candidate
        candidate = _next(probes, fitting, failing, last, budget_bytes)
    if fitting == 0:
        return result(NOTHING_FITS, None, failing)
    if failing > last:
        return result(EVERYTHING_FITS, fitting, None)
    return result(FOUND, fitting, failing)


#: How many times the largest fitting value is tried next at most.
_FARTHEST = 16


def _next(
    probes: Mapping[int, Probe], fitting: int, failing: int, last: int, budget_bytes: int | None
) -> int:
    """The next multiple to try, strictly inside the bracket."""
    guess = 0
    lost = failing <= last and probes[failing].peak_bytes is None  # an end that says nothing
    if budget_bytes is not None and not lost:
        guess = _secant(probes, fitting, failing, budget_bytes) or 0
    if failing > last and fitting > 0:  # nothing failed yet
        # Small values may share a peak that hardly depends on them: not a line to follow far.
        guess = min(guess, _FARTHEST * fitting) if guess > fitting else fitting * 2
    elif not fitting < guess < failing:
        guess = (fitting + failing) // 2
    return min(max(guess, fitting + 1), failing - 1)


def _secant(
    probes: Mapping[int, Probe], fitting: int, failing: int, budget_bytes: int
) -> int | None:
    """Where the line through the two probes nearest the budget meets it (rounded down)."""
    known = sorted(
        (abs(probe.peak_bytes - budget_bytes), multiple, probe.peak_bytes)
        for multiple, probe in probes.items()
        if probe.peak_bytes is not None
    )
    if not known:
        return None
    if len(known) == 1:
        return 2 * fitting if fitting else failing // 2
    (_, a, peak_a), (_, b, peak_b) = known[:2]
    if peak_a == peak_b:
        return None
    guess = a + int((budget_bytes - peak_a) * (b - a) // (peak_b - peak_a))
    return guess if guess != fitting else guess + 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The `search` group, checked."""

    parameter: str
    step: int
    start: int
    limit: int

    @classmethod
    def parse(cls, config: RunConfig, *, measured: bool) -> Options:
        """Raises ConfigError for an unknown search or an impossible value."""
        values = dict(config.search or {})
        name = values.pop("name", None)
        if name not in PARAMETERS:
            raise ConfigError(
                "search.name", name, f"must be one of {', '.join(PARAMETERS)}", "search=max_seq_len"
            )
        unknown = sorted(set(values) - {"step", "start", "limit"})
        if unknown:
            raise ConfigError(
                f"search.{unknown[0]}", values[unknown[0]], "no such setting", "step, start, limit"
            )
        parameter = PARAMETERS[name]
        step = values.get("step")
        if step is None:
            step = 1 if parameter == "batch_size" else 64 if measured else 8
        start = values.get("start") or getattr(config, parameter)
        limit = values.get("limit") or 2**22
        for key, value in (("step", step), ("start", start), ("limit", limit)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"search.{key}", value, "must be a whole number above 0", f"search.{key}=null"
                )
        if limit < step:
            raise ConfigError("search.limit", limit, f"is below search.step={step}", "a larger one")
        return cls(parameter=parameter, step=step, start=start, limit=limit)


def run(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """The record's sections of a maximum search on the run's device."""
    from streambp.bench.devices.choose import choose, resolve_dtype

    device = choose(config).name
    config = dataclasses.replace(
        config,
        device=dataclasses.replace(config.device, name=device),
        dtype=resolve_dtype(config, device),
    )
    options = Options.parse(config, measured=device != "simulated")
    prober = _Simulated(config) if device == "simulated" else _Measured(config)

    def try_value(value: int) -> Probe:
        probe = prober.probe(options.parameter, value)
        peak = "unknown" if probe.peak_bytes is None else size_text(probe.peak_bytes)
        fits = "fits" if probe.fits else "does not fit"
        over = (probe.peak_bytes or 0) - (prober.budget_bytes or math.inf)
        if not probe.fits and over > 0:
            fits += f" by {over / 2**20:,.3g} MiB"
        progress.message(f"{options.parameter}={value}: {prober.provenance} peak {peak}, {fits}")
        return probe

    progress.phase(f"search of the largest {options.parameter}")
    found = find_max(
        try_value,
        budget_bytes=prober.secant_budget_bytes,
        step=options.step,
        start=options.start,
        limit=options.limit,
    )
    message = prober.describe(options, found)
    progress.message(message)
    return {
        "search": {
            "parameter": options.parameter,
            "outcome": found.outcome,
            "largest": found.largest,
            "smallest_failing": found.smallest_failing,
            "step": options.step,
            "limit": options.limit,
            "budget_bytes": prober.budget_bytes,
            "probes": [dataclasses.asdict(probe) for probe in found.probes],
            "message": message,
        },
        "memory": prober.memory_of(options.parameter, found.largest),
        "provenance": {"search": prober.provenance, "memory": prober.provenance},
        "notes": [message, *prober.notes],
    }


class _Simulated:
    """Probes by simulation, in this process."""

    provenance = "simulated"

    def __init__(self, config: RunConfig):
        from streambp.sim.record import budget_bytes_of, workload_of

        self._config = config
        self._workload = workload_of(config)
        self.budget_bytes = budget_bytes_of(config, self._workload)
        self.secant_budget_bytes: int | None = self.budget_bytes
        self.notes = [f"assumptions: {self._workload.assumptions.to_dict()}"]

    def probe(self, parameter: str, value: int) -> Probe:
        from streambp.sim.simulation import simulate

        peak = simulate(self._workload.replace(**{parameter: value})).peak_bytes
        return Probe(value=value, fits=peak <= self.budget_bytes, peak_bytes=peak)

    def describe(self, options: Options, found: SearchResult) -> str:
        assert self._workload.gpu is not None
        usable = size_text(self.budget_bytes)
        where = f"on {self._workload.gpu.name} (simulated, {usable} usable)"
        return _describe(options, found, where, self._resident())

    def _resident(self) -> str:
        from streambp.sim.record import resident_message

        return resident_message(self._workload)

    def memory_of(self, parameter: str, value: int | None) -> dict[str, Any] | None:
        from streambp.sim.record import memory_section

        if value is None:
            return None
        return memory_section(self._workload.replace(**{parameter: value}), self.budget_bytes)


class _Measured:
    """Probes by a run of its own process each, without training and timing."""

    provenance = "measured"

    def __init__(self, config: RunConfig):
        budget_gib = config.budget_gib
        if config.device.name == "cpu" and budget_gib is None:
            raise ConfigError(
                "budget_gib",
                None,
                "a search on the CPU needs the memory it may use",
                "budget_gib=2",
            )
        self._config = config
        self.budget_bytes = None if budget_gib is None else int(budget_gib * _GIB)
        # A CPU's probe tells its peak beyond the budget too; a GPU's ends before.
        self.secant_budget_bytes = self.budget_bytes if config.device.name == "cpu" else None
        self.notes: list[str] = []
        self._memory: dict[int, dict[str, Any] | None] = {}

    def probe(self, parameter: str, value: int) -> Probe:
        from streambp.bench.supervise import Ending, end_of_log, supervise

        config = self._config.replace(
            **{parameter: value},
            search=None,
            steps=0,
            measure=dataclasses.replace(self._config.measure, memory=True, timing_samples=0),
        )
        with tempfile.TemporaryDirectory(prefix="streambp_search_") as folder:
            path = Path(folder)
            (path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
            ending = Ending()
            supervise(path, ending, timeout_s=config.timeout_s)
            if ending.status not in ("ok", "oom"):
                print(f"{parameter}={value} ended as {ending.status}; its log:")
                print(end_of_log(path), flush=True)  # into the log of the search
        if ending.status not in ("ok", "oom"):
            raise RuntimeError(
                f"{parameter}={value} ended as {ending.status}, which says nothing about memory: "
                f"{ending.detail}"
            )
        self._memory[value] = ending.sections.get("memory")
        memory = self._memory[value] or {}
        peak = memory.get("peak_allocated_bytes") or memory.get("peak_live_bytes")
        return Probe(value=value, fits=ending.status == "ok", peak_bytes=peak)

    def describe(self, options: Options, found: SearchResult) -> str:
        where = f"on device={self._config.device.name} (measured)"
        return _describe(options, found, where, self._smallest(found))

    def _smallest(self, found: SearchResult) -> str:
        """What the probe of the smallest value, which does not fit, took."""
        probe = next((p for p in found.probes if p.value == found.smallest_failing), None)
        budget = "all there is" if self.budget_bytes is None else size_text(self.budget_bytes)
        if probe is None or probe.peak_bytes is None:
            return f"it ran out of memory (budget: {budget}) before its peak was known"
        return f"its measured peak is {size_text(probe.peak_bytes)} (budget: {budget})"

    def memory_of(self, parameter: str, value: int | None) -> dict[str, Any] | None:
        return None if value is None else self._memory.get(value)


def _describe(options: Options, found: SearchResult, where: str, resident: str) -> str:
    """One line that says what was found."""
    name = options.parameter
    if found.outcome == NOTHING_FITS:
        return f"nothing fits {where}, not even {name}={options.step}: {resident}"
    if found.outcome == EVERYTHING_FITS:
        return f"everything up to {name}={found.largest} (the limit) fits {where}"
    return (
        f"largest {name} {where}: {found.largest} fits, {found.smallest_failing} does not "
        f"({len(found.probes)} probes)"
    )
