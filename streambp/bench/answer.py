"""What a simulated run answers: does it fit, what takes the memory, how long it would take.

Gradient checkpointing of the same run stands beside it. Every number is simulated or, the times,
predicted; the title and the lines say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.table import Table

from streambp.bench.records import RunRecord
from streambp.bench.tables import GIB, heading, seconds

_SIMULATED = "simulated"
_NUM_TENSORS = 6
_SHOWN_NOTES = ("device=auto", "no checkpointing beside it", "assumptions", "predicted time")
_STAGES = ("forward", "recompute", "backward")
_RESERVED = {
    "default segments": "peak_reserved_bytes",
    "expandable segments": "peak_reserved_expandable_bytes",
}
_REST, _NEGLIGIBLE = "other", 1e-3  # categories below this share of the peak are one row
Values = Mapping[str, Any]


def has_answer(record: RunRecord) -> bool:
    """Whether a record is of one simulated run (no search, no benchmark)."""
    simulated = record.provenance.get("memory") == _SIMULATED
    return bool(simulated and record.memory and not record.search and not record.benchmark)


def answer_table(record: RunRecord) -> Table:
    """Fit, peak, reserved memory, categories, FLOPs and times; one column for each method."""
    runs = {record.config["method"]["name"]: _sections(record)}
    beside = {name: values.get("beside", {}) for name, values in _sections(record).items()}
    if beside["memory"]:
        runs[beside["memory"]["method"]] = beside
    table = Table()
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for group in _rows(list(runs.values())):
        for row in group:
            table.add_row(*row)
        table.add_section()
    return table


def answer_heading(record: RunRecord) -> str:
    """What was simulated, and on which GPU."""
    memory = record.memory or {}
    return (
        f"{heading([record])}, {_gib(memory['budget_bytes'])} GiB usable; no GPU was used. "
        "Memory is simulated, time predicted"
    )


def answer_lines(record: RunRecord) -> list[str]:
    """The largest tensors at the peak, and what the numbers assume."""
    memory = record.memory or {}
    notes = [note for note in record.notes if note.startswith(_SHOWN_NOTES)]
    return [
        f"largest tensors at the simulated peak ({memory['peak_phase']}):",
        *(f"  {line}" for line in _largest(memory["peak_largest"])),
        *notes,
    ]


def _sections(record: RunRecord) -> dict[str, Values]:
    return {
        "memory": record.memory or {},
        "time": record.time or {},
        "flops": record.flops or {},
    }


def _rows(runs: list[dict[str, Values]]) -> Iterator[list[tuple[str, ...]]]:
    """Groups of rows: a name, then a text for each run."""
    memories = [run["memory"] for run in runs]

    def row(name: str, values: list[Any]) -> tuple[str, ...]:
        return (name, *map(str, values))

    yield [
        row("fits", [_fit(memory) for memory in memories]),
        row(
            "simulated peak, GiB", [_gib(memory.get("peak_allocated_bytes")) for memory in memories]
        ),
        row("  reached in", [memory.get("peak_phase", "-") for memory in memories]),
        row("  by the op", [_op(memory.get("peak_op", "-")) for memory in memories]),
        *(
            row(f"  reserved, {kind}", [_gib(memory.get(name)) for memory in memories])
            for kind, name in _RESERVED.items()
        ),
    ]
    of_peak = [_categories(memory) for memory in memories]
    names = {name: max(one.get(name, 0) for one in of_peak) for one in of_peak for name in one}
    yield [
        row(f"  {name.replace('_', ' ')}", [_gib(one.get(name, 0)) for one in of_peak])
        for name in sorted(names, key=lambda name: (name == _REST, -names[name]))
    ]
    flops = [run["flops"] for run in runs]
    yield [
        row("FLOPs", [_number(values.get("total_flops")) for values in flops]),
        *(
            row(
                f"  {kind}: {', '.join(_STAGES)}",
                [
                    "  ".join(_number(values.get(f"{kind}_{s}_flops", 0)) for s in _STAGES)
                    for values in flops
                ],
            )
            for kind in ("matmul", "attention")
        ),
    ]
    yield [
        row(
            f"predicted time, s: {name.replace('_', ' and ')}",
            [seconds(_first(run["time"].get(f"{name}_time_s_samples"))) for run in runs],
        )
        for name in ("forward", "backward", "forward_backward")
    ]


def _fit(memory: Values) -> str:
    if "fits" not in memory:
        return "-"
    over = _gib(abs(memory["headroom_bytes"]))
    return f"yes, {over} GiB to spare" if memory["fits"] else f"no, {over} GiB too much"


def _op(name: str) -> str:
    """An op without its overload: "_to_copy" of "_to_copy.default"."""
    return name.removesuffix(".default").removesuffix(".Tensor")


def _categories(memory: Values) -> dict[str, int]:
    """Bytes by category at the peak, those too small to matter as one."""
    found: dict[str, int] = {}
    smallest = _NEGLIGIBLE * memory.get("peak_allocated_bytes", 0)
    for name, num_bytes in memory.get("peak_by_category_bytes", {}).items():
        key = name if num_bytes >= smallest else _REST
        found[key] = found.get(key, 0) + num_bytes
    return found


def _largest(tensors: list[Values]) -> Iterator[str]:
    """One line for each group of alike tensors."""

    def alike(tensor: Values) -> tuple[Any, ...]:
        return (tensor["category"], tensor["bytes"], tensor["dtype"], tuple(tensor["shape"]))

    groups = [(key, list(group)) for key, group in groupby(sorted(tensors, key=alike), alike)]
    groups.sort(key=lambda item: -item[0][1])
    for (category, num_bytes, dtype, shape), group in groups[:_NUM_TENSORS]:
        names = dict.fromkeys(_op(tensor["name"]) for tensor in group if tensor["name"] != category)
        each = f"{len(group)} x " if len(group) > 1 else ""
        kind = ": ".join(filter(None, [category.replace("_", " "), ", ".join(names)]))
        yield f"{each}{_gib(num_bytes)} GiB  {kind}  {dtype} {list(shape)}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def _first(samples: list[float] | None) -> float | None:
    return samples[0] if samples else None
