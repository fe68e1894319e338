"""Published memory results beside their simulation, with the error of every point."""

from streambp.sim.fidelity.report import run

__all__ = ["run"]
