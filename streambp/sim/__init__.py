"""Simulation of training memory, FLOPs and time on GPUs that are not there."""

from streambp.sim.record import simulate_run

__all__ = ["simulate_run"]
