"""Reads back what W&B stored offline: its log is LevelDB's, a protobuf record in each entry."""

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 32768
_FILE_HEADER, _CHUNK_HEADER = 7, 7
_FULL, _LAST = 1, 4


@dataclass
class Stored:
    """What a server would get."""

    project: str = ""
    run_id: str = ""
    group: str = ""
    name: str = ""
    tags: list = field(default_factory=list)
    config: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    exit_code: int | None = None
    kinds: set = field(default_factory=set)  # of records
    folder: Path | None = None
    raw: bytes = b""  # of all records, without the log's headers

    def table(self, key):
        """(columns, rows) of a logged table."""
        values = [row[key] for row in self.history if key in row]
        assert values and values[-1]["_type"] == "table-file", (key, values)
        content = json.loads((self.folder / "files" / values[-1]["path"]).read_text())
        return content["columns"], content["data"]


def read(folder):
    """What the one finished offline run below a folder stored. W&B writes it with a delay."""
    deadline = time.monotonic() + 20
    while True:
        (log,) = Path(folder).rglob("*.wandb")
        found = _parsed(log)
        if found.exit_code is not None or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _parsed(log):
    from wandb.proto import wandb_internal_pb2

    found = Stored(folder=log.parent)
    for data in _entries(log.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        found.raw += data
        found.kinds.add(kind)
        if kind == "run":
            run = record.run
            found.project, found.run_id, found.group = run.project, run.run_id, run.run_group
            found.name, found.tags = run.display_name, list(run.tags)
            _update(found.config, run.config.update)
        elif kind == "config":
            _update(found.config, record.config.update)
        elif kind == "history":
            found.history.append(_update({}, record.history.item))
        elif kind == "summary":
            _update(found.summary, record.summary.update)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _update(values, items):
    for item in items:
        path = list(item.nested_key) or [item.key]
        place = values
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = json.loads(item.value_json)
    return values


def _entries(data):
    position, entry = _FILE_HEADER, b""
    while position + _CHUNK_HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK_HEADER:  # the rest of a block is padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _CHUNK_HEADER])
        position += _CHUNK_HEADER
        entry += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield entry
            entry = b""
