"""What a record must hold for the tables, the plots and the page to read it without a look."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from streambp.bench import paper
from streambp.bench.records import RunRecord

_FLAGS = ("keep_kv", "keep_attention", "fits", "git_dirty")
_NUMBERS = (
    *("lora_rank", "batch_size", "grad_accum", "seed", "num_chunks", "time_samples"),
    *("loss_first", "loss_last", "total_flops", "search_num_probes"),
    *("search_largest", "search_smallest_failing", "search_step"),
)
_ALWAYS = ("model", "method", "dtype", "device", "objective", "tuning", "device_label")
_UNITS = ("_tokens", "_bytes", "_time_s")
_AT_LEAST_1 = ("seq_len_tokens", "batch_size")
_LARGEST = 1e24  # beyond any number of bytes, FLOPs or seconds


def check_record(record: RunRecord) -> None:
    """What is read beside the row of a record.

    Raises:
        TypeError, ValueError, ...: it does not have the form that its schema version promises.
    """
    for value in _leaves(vars(record)):
        if isinstance(value, str):
            value.encode("utf-8")  # half a surrogate pair is no text
    for name, value in (("overrides", record.overrides), ("notes", record.notes)):
        if not all(isinstance(word, str) for word in value):
            raise TypeError(f"{name}: {value!r} where texts should be")
    benchmark, search = record.benchmark, record.config.get("search")
    for name, section in (("benchmark", benchmark), ("config.search", search)):
        if not isinstance(section, (Mapping, type(None))):
            raise TypeError(f"{name}: {section!r} where a section should be")
    if not isinstance((benchmark or {}).get("summary"), (list, type(None))):
        raise TypeError("benchmark.summary: not a list of lines")
    if not isinstance((search or {}).get("name"), (str, type(None))):
        raise TypeError("config.search.name: not a text")
    paper.values_of(record)
    paper.matching(record)


def check_row(row: Mapping[str, Any]) -> None:
    """Every cell of a row is of its column's kind, or None.

    Raises:
        TypeError, ValueError: the message names the column and the value.
    """
    for column, value in row.items():
        if column in _AT_LEAST_1 and (value is None or value < 1):
            raise ValueError(f"{column}: {value!r} where a number from 1 should be")
        if value is None and column in _ALWAYS:
            raise TypeError(f"{column}: nothing where a text should be")
        if value is None:
            continue
        if column in _FLAGS:
            if not isinstance(value, bool):
                raise TypeError(f"{column}: {value!r} where true or false should be")
        elif column in _NUMBERS or column.endswith(_UNITS):
            number(value)
        elif not isinstance(value, str):
            raise TypeError(f"{column}: {value!r} where a text should be")


def number(value: Any) -> Any:
    """The value, if it is a finite number or None.

    Raises:
        TypeError, ValueError: it is not; the message says what it is.
    """
    if value is None:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} where a number should be")
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise ValueError(f"{value!r}: not a number that a run has")
    return value


def numbers(values: Any) -> list[Any]:
    """The values, if they are a list of numbers or None; none at all are [].

    Raises:
        TypeError, ValueError: they are not.
    """
    if not isinstance(values, (list, type(None))):
        raise TypeError(f"{values!r} where a list of numbers should be")
    return [number(value) for value in values or ()]


def _leaves(value: Any) -> Iterator[Any]:
    """What lies in nested sections and lists, and the sections' keys."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            rest += value
        else:
            yield value
