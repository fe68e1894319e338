"""What a file must hold to be a run record: everything that code which reads records relies on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "error", "killed")
_MAX_DEPTH = 64  # of nested lists and mappings; copying a record recurses several times a level

_Types = tuple[type, ...]
_NONE = type(None)
_OPTIONAL_DICT: _Types = (dict, _NONE)
_OPTIONAL_TEXT: _Types = (str, _NONE)
_NUMBER: _Types = (int, float, _NONE)
_FIELDS: dict[str, _Types] = {
    "run_id": (str,),
    "fingerprint": (str,),
    "experiment": (str,),
    "job": (str,),
    "status": (str,),
    "started_at": (str,),
    "finished_at": (str,),
    "config": (dict,),
    "status_detail": _OPTIONAL_TEXT,
    "overrides": (list,),
    "versions": (dict,),
    "hardware": (dict,),
    "git": (dict,),
    "training": _OPTIONAL_DICT,
    "memory": _OPTIONAL_DICT,
    "time": _OPTIONAL_DICT,
    "flops": _OPTIONAL_DICT,
    "search": _OPTIONAL_DICT,
    "provenance": (dict,),
    "notes": (list,),
}
# What fields hold, where they are there. "*": every entry of a list or mapping, or every key that
# ends so.
_INNER: dict[str, _Types] = {
    "benchmark": _OPTIONAL_DICT,
    "benchmark.summary": (list,),
    "benchmark.summary.*": (str,),
    "overrides.*": (str,),
    "notes.*": (str,),
    "versions.*": _OPTIONAL_TEXT,
    "provenance.*": _OPTIONAL_TEXT,
    "git.commit": _OPTIONAL_TEXT,
    "git.dirty": (bool, _NONE),
    "hardware.gpus": (list, _NONE),
    "hardware.gpus.*": (dict,),
    **{
        f"config.{group}{name}": types
        for group in ("model", "method", "tuning", "device", "data", "experiment")
        for name, types in (("", (str, *_OPTIONAL_DICT)), (".name", (str,)))
    },
    "config.seq_len": (int,),
    "config.batch_size": (int,),
    "memory.peak_by_category_bytes": _OPTIONAL_DICT,
    "memory.peak_by_category_bytes.*": _NUMBER,
    "memory.*_bytes": (dict, *_NUMBER),
    "memory.gpu": _OPTIONAL_DICT,
    "time.*_samples": (list, _NONE),
    "time.*_samples.*": _NUMBER,
    "training.loss_per_step": (list, _NONE),
    "training.loss_per_step.*": _NUMBER,
    "search.parameter": (str,),
    "search.outcome": (str,),
    "search.message": (str,),
    "search.largest": (int, _NONE),
    "search.probes": (list,),
    "search.probes.*": (dict,),
}


def schema_problem(values: Any) -> str | None:
    """Why `values` is not a record of this schema, or None when it is one."""
    if not isinstance(values, Mapping) or "schema_version" not in values:
        return "not a run record (no schema_version)"
    if values["schema_version"] != SCHEMA_VERSION:
        version = values["schema_version"]
        return f"schema version {version!r}; this code reads version {SCHEMA_VERSION}"
    for name, types in _FIELDS.items():
        if name not in values:
            return f"field {name!r} is missing"
        if not isinstance(values[name], types):
            return f"field {name!r} holds a {type(values[name]).__name__}"
    if values["status"] not in STATUSES:
        return f"status {values['status']!r} is none of {', '.join(STATUSES)}"
    return _content_problem(values) or _inner_problem(values)


def _content_problem(values: Any) -> str | None:
    """Text that no file takes, or lists within lists without end."""
    waiting = [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            return f"its values are nested more than {_MAX_DEPTH} deep"
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                return f"the text {ascii(value)[:80]} is no Unicode text"
        elif isinstance(value, Mapping):
            waiting += ((inner, depth + 1) for pair in value.items() for inner in pair)
        elif isinstance(value, list):
            waiting += ((inner, depth + 1) for inner in value)
    return None


def _inner_problem(values: Mapping[str, Any]) -> str | None:
    for pattern, types in _INNER.items():
        for name, value in _matching(values, pattern.split(".")):
            known = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if not known:
                return f"field {name!r} holds a {type(value).__name__}"
    return None


def _matching(value: Any, parts: list[str], name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every value below `value` that the parts of a pattern name."""
    if not parts:
        yield name, value
        return
    first, *rest = parts
    if isinstance(value, list):
        entries = ((f"{name}[{index}]", inner) for index, inner in enumerate(value))
    elif isinstance(value, Mapping):
        entries = (
            (f"{name}.{key}" if name else key, inner)
            for key, inner in value.items()
            if key == first or (first[0] == "*" and key.endswith(first[1:]))
        )
    else:
        return
    for inner_name, inner in entries:
        yield from _matching(inner, rest, inner_name)
