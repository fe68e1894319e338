"""Numbers and states as the text of a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analysis.load import GIB

NOT_FITTING = "OOM"

NOTHING = "–"

_STATES = {"oom": NOT_FITTING, "nothing_fits": "none fits", "error": "error", "killed": "killed"}

Format = Callable[[float], str]


def bytes_gib(value: float) -> str:
    """Bytes as GiB without the unit, three decimals below 10."""
    gib = value / GIB
    return f"{gib:.2f}" if gib >= 10 else f"{gib:.3f}"


def bytes_gb(value: float) -> str:
    """Bytes as 10^9 bytes without the unit."""
    return f"{value / 1e9:.2f}" if value >= 1e8 else f"{value / 1e9:.4f}"


def seconds(value: float) -> str:
    """Three significant digits or more."""
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def whole(value: float) -> str:
    """A count with thousands separated."""
    return f"{value:,.0f}"


def times(value: float) -> str:
    """A ratio to the published number, to be read as "ours is ... times the published"."""
    return f"{value:.3f}" if 0.1 <= value < 10 else f"{value:.2f}"


def ours_text(row: Any, form: Format) -> str:
    """Our cell: the number, OOM (with the simulated need), or why there is none."""
    if row is None or row["cell"] in ("not_run", "missing"):
        return NOTHING
    value = row["ours"]
    known = value is not None and value == value
    if row["cell"] == "oom":
        return f"{NOT_FITTING} ({form(value)})" if known else NOT_FITTING
    if row["cell"] in _STATES:
        return _STATES[row["cell"]]
    return f"≥ {form(value)}" if row["cell"] == "lower_bound" else form(value)


def published_text(row: Any, form: Format) -> str:
    """The published cell: its number, OOM, or a dash where the paper has none."""
    if row is None or row["published_fits"] not in (True, False):
        return NOTHING
    return form(row["published"]) if row["published_fits"] else NOT_FITTING
