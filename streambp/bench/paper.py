"""The paper's published numbers, and which of them a record compares with.

One `Cell` per number of arXiv 2506.03077 that an experiment here repeats. `cells()` reads them all
from the tables in `streambp/published`; `comparison(record)` puts a record's numbers beside the
cells that have the same model, tuning, method and size.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streambp.bench.records import RunRecord
from streambp.published import load

GIB = 2**30
PAPER_GPU = "A800 80GB"
LINEAR_ROWS, LINEAR_WIDTH = 100_000, 16_384  # the paper's text says 1e6 rows, its numbers 1e5
EXPERIMENTS = {
    "bp_memory_figure": "figure 3",
    "max_seq_len_table": "table 3",
    "bp_time_table": "table 1",
    "batch_table": "table 2",
    "linear_example": "table 8",
    "other_models": "table 9",
    "chunk_size_ablation": "figure 5",
}
# Tables with a row per method: (file in streambp/published, what its columns are).
_TABLES = {
    "bp_time_table": ("bp_time_table1", "seq_len"),
    "batch_table": ("batch_time_table2", "batch_size"),
    "other_models": ("other_models_table9", "seq_len"),
}
_QWEN3_4B: dict[str, Any] = {"model": "qwen3_4b", "tuning": "full"}
# Columns of the comparison, also of the table that goes to W&B.
COLUMNS = ("source", "cell", "quantity", "unit", "published", "ours", "ratio", "provenance")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published number. `value` None: the paper says that it does not fit.

    quantity: "peak_bytes", "max_seq_len_tokens", "forward_backward_time_s", "per_sample_time_s",
    "intermediate_peak_bytes". A field that a table does not vary is None.
    """

    experiment: str
    quantity: str
    value: float | None
    method: str
    model: str | None = None
    tuning: str | None = None
    objective: str | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    num_chunks: int | None = None

    @property
    def source(self) -> str:
        """Where in the paper it stands."""
        return EXPERIMENTS[self.experiment]

    @property
    def label(self) -> str:
        """Model, tuning, method and size in words."""
        sizes = (
            ("T", self.seq_len),
            ("batch", self.batch_size),
            ("chunks", self.num_chunks),
        )
        words = [self.objective, self.model, self.tuning, self.method]
        words += [f"{name} {value}" for name, value in sizes if value is not None]
        return " ".join(word for word in words if word)


@functools.lru_cache(maxsize=1)
def cells() -> tuple[Cell, ...]:
    """Every published number that an experiment repeats, in the order of the tables."""
    return (
        *_memory_figure(),
        *_max_seq_len(),
        *_by_column("bp_time_table", "forward_backward_time_s", batch_size=1, **_QWEN3_4B),
        *_by_column("batch_table", "per_sample_time_s", seq_len=9000, **_QWEN3_4B),
        *_linear_example(),
        # The "GB" of table 9 are GiB: below 2^30 bytes each, its weights would not fit.
        *_by_column("other_models", "peak_bytes", scale=GIB, tuning="full", batch_size=1),
    )


def values_of(record: RunRecord) -> dict[str, float | None]:
    """The record's numbers under the names of `Cell.quantity`, None where it has none.

    A run that ran out of memory, or whose simulated peak exceeds the budget, has none but the
    peak that it would have needed.
    """
    memory, time = record.memory or {}, record.time or {}
    peak = memory.get("peak_allocated_bytes")
    peak = memory.get("peak_live_bytes") if peak is None else peak
    samples = time.get("forward_backward_time_s_samples")
    both = statistics.median(samples) if samples and fits(record) else None
    batch = record.config.get("batch_size") or 1
    search = record.search or {}
    return {
        "peak_bytes": peak,
        "intermediate_peak_bytes": memory.get("intermediate_peak_bytes"),
        "forward_backward_time_s": both,
        "per_sample_time_s": None if both is None else both / batch,
        "max_seq_len_tokens": search.get("largest")
        if search.get("parameter") == "seq_len"
        else None,
    }


def fits(record: RunRecord) -> bool:
    """False when the run ran out of memory or its simulated peak exceeds the budget."""
    return record.status != "oom" and (record.memory or {}).get("fits") is not False


def matching(record: RunRecord) -> list[Cell]:
    """The published cells of the record's experiment with its model, method and size.

    None for a run on a CPU, whose bytes and seconds have nothing to do with the paper's.
    """
    config = record.config
    options = (config.get("experiment") or {}).get("options") or {}
    if _name(config, "device") == "cpu":
        return []
    if record.experiment == "linear_example":
        sizes = (options.get("rows"), options.get("width"))
        if sizes != (LINEAR_ROWS, LINEAR_WIDTH):
            return []
    search = _name(config, "search")
    have = {
        "method": _name(config, "method"),
        "model": _name(config, "model"),
        "tuning": _name(config, "tuning"),
        "objective": _name(config, "objective"),
        "seq_len": config.get("seq_len"),
        "batch_size": config.get("batch_size"),
        "num_chunks": options.get("num_chunks"),
    }

    def same(cell: Cell) -> bool:
        searched = cell.quantity == "max_seq_len_tokens"
        return (
            cell.experiment == record.experiment
            and searched == (search == "max_seq_len")
            and all(getattr(cell, name) in (None, value) for name, value in have.items())
        )

    return [] if search == "max_batch_size" else [cell for cell in cells() if same(cell)]


def comparison(record: RunRecord) -> list[dict[str, Any]]:
    """Rows with `COLUMNS`: each published cell of a record, our number and ours / published."""
    ours = values_of(record)
    rows = []
    for cell in matching(record):
        value = ours[cell.quantity]
        max_search = cell.quantity.startswith("max_")
        kind = "time" if cell.quantity.endswith("_s") else "search" if max_search else "memory"
        published = cell.value
        rows.append(
            {
                "source": cell.source,
                "cell": cell.label,
                "quantity": cell.quantity,
                "unit": _unit(cell.quantity),
                "published": published,
                "ours": value,
                "ratio": value / published if value is not None and published else None,
                "provenance": record.provenance.get(kind),
            }
        )
    return rows


def _unit(quantity: str) -> str:
    return quantity.rsplit("_", 1)[-1]


def _memory_figure() -> Iterator[Cell]:
    for row in load("bp_memory_figure"):
        if row["method"] == "weights_and_grads":
            continue
        yield Cell(
            experiment="bp_memory_figure",
            quantity="peak_bytes",
            value=float(row["peak_gib"]) * GIB,
            model=row["model"],
            tuning=row["tuning"],
            method=row["method"],
            seq_len=int(row["seq_len"]),
            batch_size=1,
        )


def _max_seq_len() -> Iterator[Cell]:
    for row in load("max_seq_len_table3"):
        yield Cell(
            experiment="max_seq_len_table",
            quantity="max_seq_len_tokens",
            value=_number(row["max_seq_len"]),
            objective=row["objective"],
            model=row["model"],
            tuning=row["tuning"],
            method=row["method"],
            batch_size=1,
        )


def _linear_example() -> Iterator[Cell]:
    for row in load("linear_example_table8"):
        num_chunks = int(row["num_chunks"])
        for quantity, column, scale in (
            ("peak_bytes", "peak_gb", 1e9),
            ("intermediate_peak_bytes", "intermediate_gb", 1e9),
            ("forward_backward_time_s", "seconds", 1.0),
        ):
            yield Cell(
                experiment="linear_example",
                quantity=quantity,
                value=float(row[column]) * scale,
                method="standard" if num_chunks == 1 else "streambp",
                num_chunks=num_chunks,
            )


def _by_column(
    experiment: str, quantity: str, *, scale: float = 1.0, **fixed: Any
) -> Iterator[Cell]:
    """The cells of a table with a row per method (and model) and a column per size."""
    name, column = _TABLES[experiment]
    for row in load(name):
        labels: dict[str, Any] = {key: row[key] for key in ("model", "method") if key in row}
        for key, text in row.items():
            if key not in labels:
                value = _number(text)
                fields: dict[str, Any] = {**fixed, **labels, column: int(key)}
                yield Cell(
                    experiment=experiment,
                    quantity=quantity,
                    value=None if value is None else value * scale,
                    **fields,
                )


def _number(text: str) -> float | None:
    """A cell's number; None where it is empty (does not fit)."""
    return float(text) if text.strip() else None


def _name(config: Mapping[str, Any], group: str) -> Any:
    value = config.get(group)
    return value.get("name") if isinstance(value, Mapping) else value
