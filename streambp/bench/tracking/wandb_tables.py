"""What a record holds beyond single numbers, as tables for W&B: plain columns and rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streambp.bench import paper
from streambp.bench.folders import TIMELINE_NAME
from streambp.bench.records import RunRecord

_MAX_TIMELINE_POINTS = 300  # per category: W&B draws tables of up to 10,000 rows


@dataclass(frozen=True)
class Plot:
    """How W&B draws a table: the function of `wandb.plot` and the columns that it takes."""

    kind: Literal["line", "scatter", "bar"]
    columns: dict[str, str]
    title: str


@dataclass(frozen=True)
class RunTable:
    """One table, and the plot beside it."""

    columns: tuple[str, ...]
    rows: list[list[Any]]
    plot: Plot


def tables_of(record: RunRecord, folder: Path) -> dict[str, RunTable]:
    """The tables of a finished run by their key in W&B; only those that have rows.

    "time/samples", "memory/timeline" (live bytes by category), "search/probes" and
    "paper/comparison" (published numbers, ours and the ratio).
    """
    found = {
        "time/samples": _samples(record),
        "memory/timeline": _timeline(folder),
        "search/probes": _probes(record),
        "paper/comparison": _comparison(record),
    }
    return {key: table for key, table in found.items() if table.rows}


def _samples(record: RunRecord) -> RunTable:
    rows = [
        [name.removesuffix("_samples"), index, value]
        for name, values in (record.time or {}).items()
        if name.endswith("_s_samples")
        for index, value in enumerate(values or [])
    ]
    axes = {"x": "sample", "y": "seconds", "stroke": "measure"}
    return RunTable(
        ("measure", "sample", "seconds"), rows, Plot("line", axes, "Raw time samples, seconds")
    )


def _timeline(folder: Path) -> RunTable:
    """Live bytes by category over the ops of one pass, thinned."""
    columns = ("op_index", "phase", "category", "live_bytes")
    axes = {"x": "op_index", "y": "live_bytes", "stroke": "category"}
    plot = Plot("line", axes, "Live bytes by category over one pass")
    try:
        values = json.loads((folder / TIMELINE_NAME).read_text(encoding="utf-8"))
        live, ops, phases = values["live_bytes"], values["op_index"], values["phase"]
        by_category = {**values["by_category_bytes"], "total": live}
    except (OSError, ValueError, KeyError, TypeError):
        return RunTable(columns, [], plot)
    step = max(1, -(-len(live) // _MAX_TIMELINE_POINTS))
    kept = [
        max(range(first, min(first + step, len(live))), key=live.__getitem__)
        for first in range(0, len(live), step)
    ]
    rows = [
        [ops[i], phases[i], category, column[i]]
        for category, column in by_category.items()
        if max(column, default=0) > 0
        for i in kept
    ]
    return RunTable(columns, rows, plot)


def _probes(record: RunRecord) -> RunTable:
    search = record.search or {}
    columns = ("parameter", "probe", "value", "fits", "peak_bytes", "provenance")
    provenance = record.provenance.get("search")
    rows = [
        [search.get("parameter"), i, p["value"], p["fits"], p.get("peak_bytes"), provenance]
        for i, p in enumerate(search.get("probes") or [])
    ]
    axes = {"x": "value", "y": "peak_bytes"}
    return RunTable(columns, rows, Plot("scatter", axes, "Peak bytes of the values tried"))


def _comparison(record: RunRecord) -> RunTable:
    rows = [[row[name] for name in paper.COLUMNS] for row in paper.comparison(record)]
    axes = {"label": "cell", "value": "ratio"}
    return RunTable(paper.COLUMNS, rows, Plot("bar", axes, "Ours / published"))
