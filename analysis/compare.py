"""Our numbers beside the published ones: one row per number of an experiment.

A row holds a quantity of one run ("peak_bytes", "forward_backward_time_s", ...), how it came to be,
the published number it compares with (or none) and the ratio. What did not fit is a row too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.load import frame, newest
from streambp.bench import paper
from streambp.bench.records import RunRecord

# What each experiment reports, in the order of its columns.
QUANTITIES = {
    "bp_memory_figure": ("peak_bytes",),
    "other_models": ("peak_bytes",),
    "max_seq_len_table": ("max_seq_len_tokens",),
    "bp_time_table": ("forward_backward_time_s",),
    "batch_table": ("per_sample_time_s", "max_batch_size"),
    "linear_example": ("peak_bytes", "intermediate_peak_bytes", "forward_backward_time_s"),
    "chunk_size_ablation": ("peak_bytes", "activation_peak_bytes", "forward_backward_time_s"),
}
METHODS = ("standard", "checkpointing", "mst", "streambp")
# A number's cell: "ok"; "oom"; "lower_bound" (all that was tried fits); "nothing_fits"; "error",
# "killed"; "missing" (the run has no such number); "not_run" (only published).
ANSWERED = ("ok", "lower_bound")
# Stated in the paper's text: no table of it has largest batches.
_CLAIMED_BATCH_RATIO = 4.5
_CLAIMED_OF = {"model": "qwen3_8b", "tuning": "full"}


@dataclass(frozen=True, order=True)
class Context:
    """What must agree for numbers to stand in one table. A simulated device's label says so."""

    device_label: str
    dtype: str

    @property
    def on_cpu(self) -> bool:
        """True for the measured runs of a CPU, which no published number compares with."""
        return self.device_label.startswith("CPU")


def comparison(found: Iterable[RunRecord], experiment: str) -> pd.DataFrame:
    """All numbers of an experiment's records, and the published numbers nobody ran.

    Columns: those of `analysis.load.frame`, and quantity, provenance (of this quantity), ours,
    cell (see `ANSWERED`), published, published_fits, ratio. Of several runs of one
    configuration the newest counts. Published numbers without a run stand in the rows whose
    device_label is None.
    """
    records = [r for r in found if r.experiment == experiment]
    keys = ["device_label", "dtype", "variant", *_FRAME_CELL, "optimizer", "assumptions"]
    keys += ["search_parameter"]
    rows = newest(frame(records), keys)
    numbers = [
        number
        for index, row in rows.to_dict("index").items()
        for number in _numbers(row, records[int(str(index))], experiment)
    ]
    seen = {(n["quantity"], *_key(n)) for n in numbers if n["published_fits"] is not None}
    for cell in paper.cells():
        if cell.experiment == experiment:
            number = _published_only(cell)
            if (number["quantity"], *_key(number)) not in seen:
                numbers.append(number)
    columns = [*rows.columns, *_ADDED]
    return pd.DataFrame(numbers, columns=columns)


_ADDED = ("quantity", "provenance", "ours", "cell", "published", "published_fits", "ratio")
_SEARCHES = {"max_seq_len": "max_seq_len_tokens", "max_batch_size": "max_batch_size"}
_OF_A_MODEL = ("model", "tuning", "objective", "seq_len_tokens", "batch_size")
_FRAME_CELL = (
    "model",
    "tuning",
    "objective",
    "method",
    "seq_len_tokens",
    "batch_size",
    "num_chunks",
)


def contexts(numbers: pd.DataFrame) -> list[Context]:
    """The contexts with runs in a comparison: GPUs first, simulated or measured, then CPUs."""
    run = numbers[numbers["device_label"].notna()]
    found = {Context(row.device_label, row.dtype) for row in run.itertuples()}
    return sorted(found, key=lambda context: (context.on_cpu, context))


def within(numbers: pd.DataFrame, context: Context) -> pd.DataFrame:
    """A context's rows; on a GPU also the published numbers nobody ran."""
    same = (numbers["device_label"] == context.device_label) & (numbers["dtype"] == context.dtype)
    rows = numbers[same]
    if context.on_cpu:
        return rows
    quantities = rows["quantity"].unique()
    alone = numbers["device_label"].isna() & numbers["quantity"].isin(quantities)
    return numbers[same | alone]


def method_order(name: str) -> tuple[int, str]:
    """A sorting key: the methods of the paper in its order, then others by name."""
    return (METHODS.index(name) if name in METHODS else len(METHODS), name)


def natural(values: Iterable[Any]) -> list[Any]:
    """A sorting key that puts 8b before 14b, and what is unknown first."""
    key = []
    for value in values:
        if value is None or value != value:
            key.append([(0, 0.0, "")])
        elif isinstance(value, str):
            parts = re.findall(r"\d+|\D+", value)
            key.append([(1, float(p), "") if p.isdigit() else (2, 0.0, p) for p in parts])
        else:
            key.append([(1, float(value), "")])
    return key


def ratio_of(
    rows: pd.DataFrame, over: str, under: str, keys: Sequence[str], column: str = "ours"
) -> list[tuple[dict[str, Any], float, pd.Series, pd.Series]]:
    """(keys, over / under, row of over, row of under) for each setting that has both methods.

    Of several variants of a method the one with the best `under` value counts: the largest ratio.
    """
    result = []
    usable = rows[rows[column].notna() & (rows["cell"].isin(ANSWERED) | (column == "published"))]
    for values, group in usable.groupby(list(keys), dropna=False, sort=True):
        tops = group[group["method"] == over]
        bottoms = group[group["method"] == under]
        pairs = [
            (top[column] / bottom[column], top, bottom)
            for _, top in tops.iterrows()
            for _, bottom in bottoms.iterrows()
            if bottom[column]
        ]
        if pairs:
            ratio, top, bottom = max(pairs, key=lambda pair: pair[0])
            result.append((dict(zip(keys, values, strict=True)), ratio, top, bottom))
    return result


def claimed_batch_ratio(context: Context, setting: Mapping[str, Any]) -> float | None:
    """How many times checkpointing's batch the paper claims for a setting, None where nothing."""
    if context.on_cpu or any(setting.get(name) != value for name, value in _CLAIMED_OF.items()):
        return None
    return _CLAIMED_BATCH_RATIO


def _key(number: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(_plain(number.get(name)) for name in _FRAME_CELL)


def _plain(value: Any) -> Any:
    return None if value is None or value != value else value


def _numbers(row: dict[str, Any], record: RunRecord, experiment: str) -> list[dict[str, Any]]:
    """A record's numbers, one row each."""
    values = paper.values_of(record)
    memory = record.memory or {}
    values["activation_peak_bytes"] = memory.get("activation_peak_bytes")
    search = record.search or {}
    searched = (record.config.get("search") or {}).get("name")
    searched = None if searched == "none" else searched
    if search.get("parameter") == "batch_size":
        values["max_batch_size"] = search.get("largest")
    published = {cell.quantity: cell for cell in paper.matching(record)}
    numbers = []
    for quantity in QUANTITIES[experiment]:
        if quantity.startswith("max_") != (searched is not None):
            continue
        if searched is not None and quantity != _SEARCHES.get(searched):
            continue
        cell = published.get(quantity)
        ours, state = values.get(quantity), _state(row, record, quantity, values.get(quantity))
        number = {
            **row,
            "quantity": quantity,
            "ours": ours,
            "cell": state,
            "provenance": _provenance(record, quantity),
            "published": cell.value if cell else None,
            "published_fits": None if cell is None else cell.value is not None,
            "ratio": None,
        }
        if quantity == "max_seq_len_tokens":
            number["seq_len_tokens"] = None  # where the search began says nothing
        if quantity == "max_batch_size":
            number["batch_size"] = None
        if record.config["experiment"].get("kind") == "linear_example":
            number.update(dict.fromkeys(_OF_A_MODEL))
        if cell and cell.value and ours is not None and state in ANSWERED:
            number["ratio"] = ours / cell.value
        numbers.append(number)
    return numbers


def _state(row: dict[str, Any], record: RunRecord, quantity: str, value: Any) -> str:
    if record.status in ("error", "killed"):
        return record.status
    outcome = (record.search or {}).get("outcome")
    if quantity.startswith("max_") and outcome is not None:
        return {"found": "ok", "everything_fits": "lower_bound"}.get(outcome, "nothing_fits")
    if not paper.fits(record):
        return "oom"
    return "ok" if value is not None else "missing"


def _provenance(record: RunRecord, quantity: str) -> str | None:
    section = "memory"
    if quantity.endswith("_s"):
        section = "time"
    elif quantity.startswith("max_"):
        section = "search"
    found = record.provenance.get(section)
    if found is None and record.status != "ok":
        # A failed run has no number; it stands in the table that it was meant for.
        simulated = (record.config.get("device") or {}).get("name") == "simulated"
        found = ("predicted" if section == "time" else "simulated") if simulated else "measured"
    return found


def _published_only(cell: paper.Cell) -> dict[str, Any]:
    return {
        "experiment": cell.experiment,
        "model": cell.model,
        "tuning": cell.tuning,
        "objective": cell.objective or ("sft" if cell.model else None),
        "method": cell.method,
        "variant": cell.method,
        "seq_len_tokens": cell.seq_len,
        "batch_size": cell.batch_size,
        "num_chunks": cell.num_chunks,
        "quantity": cell.quantity,
        "cell": "not_run",
        "published": cell.value,
        "published_fits": cell.value is not None,
    }
