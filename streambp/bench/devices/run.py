"""One run on the device it was settled on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streambp.bench.config import RunConfig
from streambp.bench.devices.choose import choose, resolve_dtype
from streambp.bench.progress import Progress

__all__ = ["run"]


def run(cfg: RunConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Do the work of one run; returns the record's sections.

    Sections are also sent to ``progress`` as soon as they are known, so that a run that ends early
    keeps them. Out of memory and every other failure propagate.
    """
    progress = progress or Progress()
    device = choose(cfg).name
    cfg = replace(cfg, device=replace(cfg.device, name=device), dtype=resolve_dtype(cfg, device))
    if device == "simulated":
        return _simulate(cfg, progress)
    from streambp.bench.devices.measured import measure

    return measure(cfg, progress)


def _simulate(cfg: RunConfig, progress: Progress) -> dict[str, Any]:
    from streambp import sim
    from streambp.bench.memory.budget import OverBudgetError

    progress.phase("simulation")
    sections = dict(sim.simulate_run(cfg))
    for name, values in sections.items():
        progress.section(name, values)
    memory = sections["memory"]
    if memory.get("fits") is False:  # an answer: the record says "oom" beside its numbers
        raise OverBudgetError(
            memory["peak_allocated_bytes"],
            memory["budget_bytes"],
            simulated_on=memory["gpu"]["name"],
        )
    return sections
