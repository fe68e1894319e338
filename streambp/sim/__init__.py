"""Simulation of training memory, FLOPs and time on GPUs that are not there."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streambp.sim.record import simulate_run

__all__ = ["simulate_run"]


def __getattr__(name: str) -> Any:
    """Loaded on first use: the tracker alone, which real runs need, loads no simulator."""
    if name != "simulate_run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streambp.sim.record import simulate_run

    return simulate_run
