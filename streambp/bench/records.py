"""The record of one run: schema, atomic writing, reading that survives foreign files.

A record is `<runs_dir>/<experiment>/<job>/record.json`. It is written once, by a link of a
finished temporary file, and never overwritten. Bytes and seconds; an unknown value is None with a
reason in `memory["unavailable"]`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from streambp.bench.schema import SCHEMA_VERSION, schema_problem

RECORD_NAME = "record.json"
FINISHED = ("ok", "oom")  # an answer: not run again. error and killed are run again on resume
SECTIONS = ("training", "memory", "time", "flops", "search", "provenance", "notes")


class RecordError(ValueError):
    """A file that is not a record of this schema. The message names the file."""


def utc_now() -> str:
    """The time as ISO 8601 in UTC with seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(kw_only=True)
class RunRecord:
    """Everything known about one run. Sections that a run did not produce are None or empty."""

    run_id: str
    fingerprint: str
    experiment: str
    job: str
    status: str
    started_at: str
    finished_at: str
    config: dict[str, Any]
    status_detail: str | None = None
    overrides: list[str] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    time: dict[str, Any] | None = None
    flops: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    benchmark: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION
    path: Path | None = None  # of the file it was read from; not stored

    @property
    def finished(self) -> bool:
        """True when the status is an answer (ok, oom), so that a sweep does not run it again."""
        return self.status in FINISHED

    def to_json(self) -> str:
        """The file's text. A value that is not finite becomes null and is named in `notes`."""
        values = dataclasses.asdict(self)
        values.pop("path")
        lost: list[str] = []
        values = _finite(values, "", lost)
        if lost:
            values["notes"] = [*values["notes"], f"not finite, stored as null: {', '.join(lost)}"]
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> Path:
        """Write `folder/record.json`, whole or not at all.

        Raises:
            FileExistsError: there is a record already; it is left as it was.
            OSError: the folder cannot be written or the disk is full.
        """
        target = folder / RECORD_NAME
        write_new(target, self.to_json())
        self.path = target
        return target

    @classmethod
    def load(cls, path: Path | str) -> RunRecord:
        """The record in a file (or in a run's folder).

        Raises:
            RecordError: not JSON, not a record, a record of another schema version, or one that
                holds what code which reads records cannot use.
        """
        path = Path(path)
        if path.is_dir():
            path = path / RECORD_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"{path}: not a readable record ({error})") from error
        problem = schema_problem(values)
        if problem:
            raise RecordError(f"{path}: {problem}")
        known = {f.name for f in dataclasses.fields(cls)} - {"path"}
        record = cls(**{key: value for key, value in values.items() if key in known})
        record.path = path
        return record


def iter_records(root: Path | str) -> Iterator[RunRecord]:
    """All records below a folder, in the order of their paths.

    A file that cannot be read as one is skipped with a warning that names it.
    """
    for path in sorted(Path(root).rglob(RECORD_NAME)):
        try:
            yield RunRecord.load(path)
        except RecordError as error:
            warnings.warn(f"skipped {error}", stacklevel=2)


def write_new(target: Path, text: str) -> None:
    """Create a file with all its text or not at all; an existing one raises FileExistsError."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        try:
            os.link(name, target)
        except PermissionError:  # a file system without hard links
            if target.exists():
                raise FileExistsError(f"{target} exists") from None
            os.rename(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _finite(value: Any, name: str, lost: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(name)
        return None
    if isinstance(value, Mapping):
        return {
            str(k): _finite(v, f"{name}.{k}" if name else str(k), lost) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_finite(v, f"{name}[{i}]", lost) for i, v in enumerate(value)]
    return value
