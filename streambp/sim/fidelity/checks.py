"""The bounds that the simulation has to keep, evaluated over a report's points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streambp.sim.fidelity.points import Point
from streambp.sim.fidelity.settings import BASELINES

#: How far the published curve's markers were misread at most; streambp may lie that much above.
READING_ERROR_GIB = 0.06


@dataclass(frozen=True, kw_only=True)
class Check:
    """A bound and what was found. `value` is what has to stay within `bound`."""

    name: str
    value: float
    bound: float
    at_least: bool = False  # the bound is a minimum

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def evaluate(points: Sequence[Point]) -> list[Check]:
    """All checks for which there are points."""
    checks: list[Check] = []

    def select(table: str, methods: Iterable[str]) -> list[Point]:
        return [p for p in points if p.table == table and p.method in methods]

    def worst(name: str, bound: float, chosen: list[Point]) -> None:
        if chosen:
            value = max(abs(point.error) for point in chosen)
            checks.append(Check(name=name, value=value, bound=bound))

    figure = select("figure3", BASELINES)
    if figure:
        mean = sum(abs(point.error) for point in figure) / len(figure)
        checks.append(Check(name="figure 3 baselines, mean error", value=mean, bound=0.001))
    worst("figure 3 baselines, worst error", 0.0025, figure)
    baselines = select("table3", BASELINES)
    is_32b_lora = [p.model == "qwen3_32b" and p.tuning == "lora" for p in baselines]
    rest = [p for p, special in zip(baselines, is_32b_lora, strict=True) if not special]
    worst("table 3 SFT baselines, worst error", 0.05, rest)
    special = [p for p, special in zip(baselines, is_32b_lora, strict=True) if special]
    worst("table 3 SFT baselines, 32B LoRA, worst error", 0.08, special)
    worst("table 8, worst error", 0.01, [p for p in points if p.table == "table8"])
    worst("table 9 baselines, worst error", 0.03, select("table9", BASELINES))
    checks += _streambp_checks(points)
    return checks


def _streambp_checks(points: Sequence[Point]) -> list[Check]:
    """streambp at or below the published curves, and its maxima at or above the published ones."""
    checks = []
    for table in ("figure3", "table9"):
        curve = [p for p in points if p.table == table and p.method == "streambp"]
        if curve:
            value = max(p.simulated - p.published for p in curve)
            name = f"{table} streambp, GiB above the published curve (reading error allowed)"
            checks.append(Check(name=name, value=value, bound=READING_ERROR_GIB))
    for table in ("figure3_maxima", "table3", "batch_ratio"):
        for point in points:
            if point.table == table and point.method == "streambp":
                name = f"{table} {point.model} {point.tuning} streambp {point.quantity}"
                checks.append(
                    Check(name=name, value=point.simulated, bound=point.published, at_least=True)
                )
    return checks + _ratio_checks(points)


def _ratio_checks(points: Sequence[Point]) -> list[Check]:
    """streambp's maximum over checkpointing's, against the published ratio."""
    maxima = {
        (p.model, p.method): p
        for p in points
        if p.table == "figure3_maxima" and p.method in ("checkpointing", "streambp")
    }
    checks = []
    for (model, method), ours in maxima.items():
        baseline = maxima.get((model, "checkpointing"))
        if method == "streambp" and baseline is not None:
            checks.append(
                Check(
                    name=f"figure 3 maxima {model}, streambp over checkpointing",
                    value=ours.simulated / baseline.simulated,
                    bound=ours.published / baseline.published,
                    at_least=True,
                )
            )
    return checks
