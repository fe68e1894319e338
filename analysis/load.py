"""Run records as one tidy pandas frame: a row per record, units in the column names, provenance.

`frame(records("runs"))` is all that the tables, plots and the report start from. What is not a
record of this schema is skipped with a warning that names the file; a value that a record does not
have is None (or NaN in a numeric column), never 0.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.checks import check_record, check_row, number, numbers
from streambp.bench.folders import TIMELINE_NAME
from streambp.bench.records import RunRecord, iter_records

GIB = 2**30
# Which field is a device's own idea of the peak, in order of preference.
_PEAKS = (("allocated", "peak_allocated_bytes"), ("live", "peak_live_bytes"))
_MEMORY_FIELDS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_live_bytes",
    "peak_rss_bytes",
    "nvml_process_bytes",
    "nvml_device_bytes",
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activation_peak_bytes",
    "budget_bytes",
    "headroom_bytes",
    "intermediate_peak_bytes",
)
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_PROVENANCES = ("memory", "time", "training", "flops", "search")
_PACKAGES = ("python", "torch", "transformers", "streambp")
_TIMES = ("forward", "backward", "forward_backward", "optimizer", "step")
COLUMNS = (
    # identity
    *("experiment", "job", "run_id", "fingerprint", "path", "timeline_path"),
    *("started_at", "finished_at", "status", "status_detail"),
    # what was run
    *("kind", "model", "method", "variant", "chunk_size_tokens", "head_chunk_size_tokens"),
    *("keep_kv", "keep_attention", "offload", "objective", "tuning", "lora_rank", "optimizer"),
    *("dtype", "seq_len_tokens", "batch_size", "grad_accum", "seed", "num_chunks", "assumptions"),
    # where
    *("device", "device_label", "gpu", "hardware"),
    # memory
    *("fits", "peak_bytes", "peak_kind", "peak_phase", *_MEMORY_FIELDS),
    # time: medians
    *(f"{name}_time_s" for name in _TIMES),
    "time_samples",
    # training, cost, search
    *("loss_first", "loss_last", "total_flops", "search_parameter", "search_outcome"),
    *("search_largest", "search_smallest_failing", "search_step", "search_num_probes"),
    "search_budget_bytes",
    # how the numbers came to be
    *(f"provenance_{name}" for name in _PROVENANCES),
    *(f"version_{name}" for name in _PACKAGES),
    *("git_commit", "git_dirty", "notes"),
)


def records(*roots: Path | str) -> list[RunRecord]:
    """The records below the folders (each once), finished or not, oldest first.

    Unreadable, foreign and older-schema files are skipped with a warning that names the file;
    a folder that does not exist is an error.

    Raises:
        FileNotFoundError: a root does not exist; the message names it and the fix.
    """
    found: dict[Path, RunRecord] = {}
    for root in roots:
        if not Path(root).is_dir():
            raise FileNotFoundError(
                f"{root}: no such folder of records. Fix: run an experiment first "
                "(python run.py -m experiment=quickstart), or name another folder"
            )
        for record in iter_records(root):
            assert record.path is not None
            found[record.path.resolve()] = record
    return sorted(found.values(), key=lambda record: (record.finished_at, str(record.path)))


def frame(found: Iterable[RunRecord]) -> pd.DataFrame:
    """One row per record, columns `COLUMNS`; the index counts the records given. Times are medians
    of the raw samples.

    A record whose insides do not have the form that its schema version promises is skipped with a
    warning that names its file.
    """
    rows = {}
    for index, record in enumerate(found):
        try:
            check_record(record)
            row = _row(record)
            check_row(row)
            rows[index] = row
        except _MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"skipped {record.path}: its contents are malformed ({reason})")
    table = pd.DataFrame(list(rows.values()), index=list(rows), columns=list(COLUMNS))
    return table.astype({"fits": object})


def sound(found: Sequence[RunRecord]) -> list[RunRecord]:
    """The records that `frame` has a row for; it warns about the others."""
    return [found[index] for index in frame(found).index]


def load(*roots: Path | str) -> pd.DataFrame:
    """`frame(records(*roots))`."""
    return frame(records(*roots))


def newest(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Of the rows that agree in `keys`, the one that ended last; an answer (ok, oom) wins over
    an error or a killed run, whatever the order."""
    if rows.empty:
        return rows
    answered = rows["status"].isin(["ok", "oom"])
    ordered = rows.assign(_answered=answered).sort_values(["_answered", "finished_at"])
    return ordered.drop(columns="_answered").drop_duplicates(list(keys), keep="last").sort_index()


def timeline(record: RunRecord | Path | str) -> dict[str, Any]:
    """The memory timeline beside a record (of a run with `measure.timeline=true`).

    Raises:
        FileNotFoundError: the run stored none; the message names the file and the fix.
        ValueError: the file is not a timeline.
    """
    path = record.path if isinstance(record, RunRecord) else Path(record)
    assert path is not None
    file = (path if path.is_dir() else path.parent) / TIMELINE_NAME
    if not file.exists():
        raise FileNotFoundError(f"{file}: the run stored no timeline. Fix: measure.timeline=true")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        by_category = values["by_category_bytes"]
        length = len(values["live_bytes"])
        complete = length > 0 and all(len(column) == length for column in by_category.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a memory timeline ({error})") from error
    if not complete or len(values.get("phase", ())) != length:
        raise ValueError(f"{file}: not a memory timeline (columns of unequal length)")
    return values


def variant(method: Mapping[str, Any]) -> str:
    """A method with the options that were set, as tables and legends call it."""
    parts = [
        f"{label} {method[key]}"
        for key, label in (("chunk_size", "chunk"), ("head_chunk_size", "head"))
        if method.get(key) is not None
    ]
    switches = ("keep_kv", "keep_attention", "recompute_head", "split_sums")
    parts += [key.replace("_", " ") for key in switches if method.get(key)]
    if method.get("offload") not in (None, "none"):
        parts.append(f"offload {method['offload']}")
    parts += [f"{key}={value}" for key, value in (method.get("options") or {}).items()]
    return f"{method['name']} ({', '.join(parts)})" if parts else str(method["name"])


def _row(record: RunRecord) -> dict[str, Any]:
    config, method = record.config, record.config["method"]
    memory, time = record.memory or {}, record.time or {}
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    for name in ("experiment", "job", "run_id", "fingerprint", "started_at", "finished_at"):
        row[name] = getattr(record, name)
    row.update(status=record.status, status_detail=record.status_detail, path=str(record.path))
    if record.path is not None and (record.path.parent / TIMELINE_NAME).exists():
        row["timeline_path"] = str(record.path.parent / TIMELINE_NAME)
    experiment = config["experiment"]
    row.update(
        kind=experiment.get("kind", "training"),
        model=config["model"]["name"],
        method=method["name"],
        variant=variant(method),
        chunk_size_tokens=method.get("chunk_size"),
        head_chunk_size_tokens=method.get("head_chunk_size"),
        keep_kv=bool(method.get("keep_kv")),
        keep_attention=bool(method.get("keep_attention")),
        offload=method.get("offload"),
        objective=_name(config, "objective"),
        tuning=_name(config, "tuning"),
        optimizer=_name(config, "optimizer"),
        dtype=config.get("dtype"),
        seq_len_tokens=number(config["seq_len"]),
        batch_size=number(config["batch_size"]),
        grad_accum=config.get("grad_accum"),
        seed=config.get("seed"),
        num_chunks=(experiment.get("options") or {}).get("num_chunks"),
    )
    if row["tuning"] == "lora":
        row["lora_rank"] = config["tuning"].get("rank")
    _where(row, record)
    _memory(row, memory)
    for name in _TIMES:
        samples = numbers(time.get(f"{name}_time_s_samples"))
        if samples:
            row[f"{name}_time_s"] = statistics.median(samples)
            row["time_samples"] = max(row["time_samples"] or 0, len(samples))
    losses = numbers((record.training or {}).get("loss_per_step")) or [None]
    row.update(loss_first=losses[0], loss_last=losses[-1])
    row["total_flops"] = (record.flops or {}).get("total_flops")
    search = record.search or {}
    for name in ("parameter", "outcome", "largest", "smallest_failing", "step", "budget_bytes"):
        value = search.get(name)
        row[f"search_{name}"] = value if isinstance(value, str) else number(value)
    if search:
        row["search_num_probes"] = len(search.get("probes") or [])
    for name in _PROVENANCES:
        row[f"provenance_{name}"] = record.provenance.get(name)
    for name in _PACKAGES:
        row[f"version_{name}"] = record.versions.get(name)
    row.update(git_commit=record.git.get("commit"), git_dirty=record.git.get("dirty"))
    row["notes"] = "\n".join(str(note) for note in record.notes)
    return row


def _memory(row: dict[str, Any], memory: Mapping[str, Any]) -> None:
    for name in _MEMORY_FIELDS:
        row[name] = number(memory.get(name))
    row.update(fits=memory.get("fits"), peak_phase=memory.get("peak_phase"))
    for kind, name in _PEAKS:
        if memory.get(name) is not None:
            row.update(peak_bytes=memory[name], peak_kind=kind)
            break


def _where(row: dict[str, Any], record: RunRecord) -> None:
    """The device, and how a caption names it."""
    config, hardware = record.config, record.hardware
    device = row["device"] = _name(config, "device")
    assumptions = {**((config.get("device") or {}).get("assumptions") or {})}
    if config.get("paper"):
        assumptions["paper"] = True
    row["assumptions"] = json.dumps(assumptions, sort_keys=True) if assumptions else None
    cpu = hardware.get("cpu_model") or "unknown CPU"
    row["hardware"] = f"{cpu}, {hardware.get('cpu_cores')} cores"
    if device == "simulated":
        gpu = (record.memory or {}).get("gpu") or config.get("gpu") or {}
        row["gpu"] = gpu.get("name")
        row["device_label"] = f"{_gpu_label(row['gpu'])} (simulated)"
    elif device == "cuda":
        gpus = hardware.get("gpus") or []
        index = (config.get("device") or {}).get("index") or 0
        row["gpu"] = gpus[index]["name"] if index < len(gpus) else None
        row["device_label"] = row["gpu"] or "GPU"
    else:
        row["device_label"] = f"CPU ({row['hardware']})"


def _gpu_label(name: str | None) -> str:
    """`a800_80gb` as people write it: A800 80GB."""
    return "unnamed GPU" if name is None else name.replace("_", " ").upper()


def _name(config: Mapping[str, Any], group: str) -> Any:
    return config[group]["name"]
