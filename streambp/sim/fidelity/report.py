"""Computes the report, prints it and writes it: `points.csv`, `checks.csv` and `report.md`."""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from streambp.bench.config import RunConfig
from streambp.bench.progress import Progress
from streambp.sim.fidelity.checks import Check, evaluate
from streambp.sim.fidelity.points import TABLES, Point
from streambp.sim.fidelity.settings import BEST_CHUNKS, GPU, PAPER_CHUNKS, REASONS
from streambp.sim.gpus import gpu_named

_UNITS = {
    "peak_gib": "GiB",
    "max_seq_len": "tokens",
    "ratio": "x",
    "peak_gb": "GB",
    "intermediate_gb": "GB",
}


def compute(
    tables: Iterable[str] | None = None, on_point: Callable[[Point], None] = lambda point: None
) -> list[Point]:
    """The points of the named tables (all of them by default), in the report's order.

    Raises:
        ValueError: an unknown table.
    """
    names = list(TABLES) if tables is None else list(tables)
    unknown = sorted(set(names) - set(TABLES))
    if unknown:
        raise ValueError(f"tables={unknown[0]!r}: unknown. Fix: some of {', '.join(TABLES)}")
    points = []
    for name in names:
        for point in TABLES[name]():
            points.append(point)
            on_point(point)
    return points


def point_line(point: Point) -> str:
    """published, simulated and error of one point, in words."""
    unit = _UNITS[point.quantity]
    digits = 0 if unit == "tokens" else 2
    return (
        f"{point.table:19} {point.model:14} {point.tuning:5} {point.method:14} {point.x:>7}  "
        f"published {point.published:>10.{digits}f} {unit}  "
        f"simulated {point.simulated:>10.{digits}f} {unit}  {100 * point.error:+7.2f}%"
    )


def check_line(check: Check) -> str:
    """What a check found, its bound, and whether it holds."""
    relation = "at least" if check.at_least else "at most"
    verdict = "ok" if check.ok else "NOT MET"
    return f"{verdict:8} {check.name}: {check.value:.4g} ({relation} {check.bound:g})"


def write(folder: Path, points: Sequence[Point]) -> None:
    """Write the report's files. Points of an older report there, if not computed again, stay."""
    folder.mkdir(parents=True, exist_ok=True)
    points = merged(read(folder) if (folder / "points.csv").is_file() else [], points)
    checks = evaluate(points)
    with open(folder / "points.csv", "w", newline="", encoding="utf-8") as file:
        names = [f.name for f in dataclasses.fields(Point)]
        writer = csv.writer(file)
        writer.writerow([*names, "error"])
        for point in points:
            writer.writerow([*(getattr(point, name) for name in names), f"{point.error:.6f}"])
    with open(folder / "checks.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "value", "bound", "kind", "ok"])
        for check in checks:
            kind = "at_least" if check.at_least else "at_most"
            writer.writerow([check.name, f"{check.value:.6g}", check.bound, kind, check.ok])
    (folder / "report.md").write_text(markdown(points, checks), encoding="utf-8")


def merged(older: Sequence[Point], newer: Sequence[Point]) -> list[Point]:
    """The newer points and those of the older ones that they don't replace, in the older order."""
    new = {_identity(point): point for point in newer}
    kept = [new.pop(_identity(point), point) for point in older]
    return [*kept, *new.values()]


def _identity(point: Point) -> tuple[str, str, str, str, int, str]:
    return (point.table, point.model, point.tuning, point.method, point.x, point.quantity)


def read(folder: Path) -> list[Point]:
    """The points of a written report."""
    with open(folder / "points.csv", newline="", encoding="utf-8") as file:
        return [
            Point(
                table=row["table"],
                model=row["model"],
                tuning=row["tuning"],
                method=row["method"],
                x=int(row["x"]),
                quantity=row["quantity"],
                published=float(row["published"]),
                simulated=float(row["simulated"]),
            )
            for row in csv.DictReader(file)
        ]


def markdown(points: Sequence[Point], checks: Sequence[Check]) -> str:
    """The report as a page."""
    gpu = gpu_named(GPU)
    tables = list(dict.fromkeys(point.table for point in points))
    lines = [
        "# Published and simulated memory",
        "",
        "Published values are measurements on one A800-80GB (arXiv 2506.03077). Ours are "
        "**simulated**: no GPU was used and nothing was fitted "
        f"(transformers {version('transformers')}, torch {version('torch')}).",
        f"A value fits when its simulated peak is at most {gpu.usable_bytes / 2**30:.2f} GiB."
        + _streamed_settings(points),
        "",
        "Assumptions of the baselines:",
        *(f"- {table}: {reason}." for table, reason in REASONS.items() if table in tables),
        "",
        "## Bounds",
        "",
        "| | check | found | bound |",
        "|---|---|---|---|",
    ]
    for check in checks:
        relation = "≥" if check.at_least else "≤"
        verdict = "ok" if check.ok else "**not met**"
        lines.append(
            f"| {verdict} | {check.name} | {check.value:.4g} | {relation} {check.bound:g} |"
        )
    for table in tables:
        lines += [
            "",
            f"## {table}",
            "",
            "| model | tuning | method | x | published | simulated | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for p in points:
            if p.table == table:
                digits = 0 if p.quantity == "max_seq_len" else 2
                lines.append(
                    f"| {p.model} | {p.tuning} | {p.method} | {p.x} "
                    f"| {p.published:.{digits}f} {_UNITS[p.quantity]} "
                    f"| {p.simulated:.{digits}f} {_UNITS[p.quantity]} | {100 * p.error:+.2f}% |"
                )
    return "\n".join(lines) + "\n"


def _streamed_settings(points: Sequence[Point]) -> str:
    if all(p.method != "streambp" or p.table == "table8" for p in points):
        return ""
    return (
        f" streambp runs with the paper's chunk sizes {PAPER_CHUNKS} (figure3_maxima_best: "
        f"{BEST_CHUNKS}), gradients resident, no mask. Its `recompute_head` and `split_sums` need "
        "less memory than its defaults and more time."
    )


def run(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """The record's sections of `experiment=paper_fidelity`.

    `experiment.options`: `tables` (names, null: all), `write_to` (a folder, null: none).
    """
    started = time.monotonic()
    options = config.experiment.options

    begun = ""

    def on_point(point: Point) -> None:
        nonlocal begun
        progress.phase(f"{point.table} {point.model} {point.method} {point.x}")
        print(point_line(point), flush=True)  # into run.log
        if begun != (begun := f"{point.table} {point.model} {point.method}"):
            progress.message(f"{begun} ({time.monotonic() - started:.0f} s)")

    progress.phase("fidelity")
    points = compute(options.get("tables"), on_point)
    checks = evaluate(points)
    if options.get("write_to"):
        write(Path(options["write_to"]), points)
    return {
        "benchmark": {
            "summary": [
                "published (A800-80GB) and simulated memory",
                *map(point_line, points),
                *map(check_line, checks),
                f"{sum(c.ok for c in checks)} of {len(checks)} bounds met, "
                f"{len(points)} points in {time.monotonic() - started:.0f} s",
            ],
            "points": [{**dataclasses.asdict(p), "error": p.error} for p in points],
            "checks": [{**dataclasses.asdict(c), "ok": c.ok} for c in checks],
        },
        "provenance": {"benchmark": "simulated"},
        "notes": [f"{table}: {reason}" for table, reason in REASONS.items()],
    }
