"""Where text comes from: this Python's standard library, local files, a saved dataset.

Sources are read one document at a time, so a large file doesn't count towards a run's memory.
"""

from __future__ import annotations

import itertools
import json
import sysconfig
from pathlib import Path
from typing import Protocol

from streambp.bench.config import DataConfig

__all__ = ["Documents", "documents_of"]

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
#: Size above which a text file is read in pieces.
_PIECE_BYTES = 1 << 20
#: Folders of the standard library's directory that aren't it, or aren't there on every machine.
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Documents(Protocol):
    """Texts by index; read when asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> str: ...


def documents_of(cfg: DataConfig) -> Documents:
    """The documents of ``data=corpus`` or ``data=file``.

    ``ValueError`` that names the field when there are none or they can't be read; for JSONL it
    names the line and the key as well.
    """
    if cfg.name == "corpus":
        return _standard_library()
    assert cfg.path is not None
    path = Path(cfg.path).expanduser()
    if path.is_dir():
        return _folder(path, cfg.text_field)
    return _file(path, cfg.text_field)


class _TextFiles:
    """Each file is one document; a larger one comes in pieces that end with a line."""

    def __init__(self, files: list[Path], errors: str):
        self._pieces = [(file, *span) for file in files for span in _spans(file)]
        self._errors = errors

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> str:
        file, start, end = self._pieces[index]
        with file.open("rb") as opened:
            opened.seek(start)
            content = opened.read(end - start)
        try:
            return content.decode("utf-8", errors=self._errors)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data.path: {file} is no UTF-8 text (byte {start + error.start}): convert it, or "
                "name a text or .jsonl file"
            ) from error


def _spans(file: Path) -> list[tuple[int, int]]:
    """(start, end) bytes of the pieces of a file, each up to the first line end after the limit."""
    size = file.stat().st_size
    if size <= _PIECE_BYTES:
        return [(0, size)] if size else []
    ends = [0]
    with file.open("rb") as opened:
        while ends[-1] < size:
            opened.seek(ends[-1] + _PIECE_BYTES)
            opened.readline()
            ends.append(min(opened.tell(), size))
    return list(itertools.pairwise(ends))


class _JsonLines:
    """Each line is a document under ``field``. All lines are checked when it is made."""

    def __init__(self, file: Path, field: str):
        self._file = file
        self._field = field
        self._offsets: list[int] = []
        with file.open("rb") as lines:
            offset = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._text(line, number)
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> str:
        with self._file.open("rb") as lines:
            lines.seek(self._offsets[index])
            return self._text(lines.readline(), number=None)

    def _text(self, line: bytes, number: int | None) -> str:
        where = f"data.path: {self._file}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}): fix or remove the line") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"{where} is no JSON object: expected one with the key {self._field!r}"
            )
        if self._field not in values:
            keys = ", ".join(map(repr, values)) or "no key"
            raise ValueError(
                f"{where} has no key {self._field!r}, it has {keys}: set data.text_field"
            )
        text = values[self._field]
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: {self._field!r} holds {type(text).__name__}, not text: set "
                "data.text_field"
            )
        return text


class _Concatenated:
    """Several sources, one after the other."""

    def __init__(self, sources: list[Documents]):
        self._sources = [(s, i) for s, source in enumerate(sources) for i in range(len(source))]
        self._of = sources

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> str:
        source, position = self._sources[index]
        return self._of[source][position]


class _SavedDataset:
    """A column of a dataset written by ``datasets.Dataset.save_to_disk``."""

    def __init__(self, folder: Path, field: str):
        try:
            from datasets import DatasetDict, load_from_disk
        except ImportError as error:
            raise ValueError(
                f"data.path={str(folder)!r} is a saved dataset, which needs the package "
                "'datasets': `pip install datasets`, or give a .txt or .jsonl file"
            ) from error
        dataset = load_from_disk(str(folder))
        if isinstance(dataset, DatasetDict):
            if "train" not in dataset:
                raise ValueError(
                    f"data.path={str(folder)!r} has the splits {', '.join(dataset)} and no "
                    "'train': name the folder of one split"
                )
            dataset = dataset["train"]
        if field not in dataset.column_names:
            raise ValueError(
                f"data.text_field={field!r}: the dataset in {folder} has the columns "
                f"{', '.join(dataset.column_names)}; name one of them"
            )
        self._dataset = dataset
        self._field = field

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> str:
        text = self._dataset[index][self._field]
        if not isinstance(text, str):
            raise ValueError(
                f"data.text_field={self._field!r}: row {index} of the dataset holds "
                f"{type(text).__name__}, not text; name another column"
            )
        return text


def _standard_library() -> Documents:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file
        for file in folder.rglob("*.py")
        if not _NOT_THE_LIBRARY.intersection(file.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(
            f"data=corpus: this Python has no sources of its standard library in {folder}; use "
            "data=file data.path=<text>, or data=random"
        )
    return _TextFiles(files, errors="replace")


def _file(file: Path, field: str) -> Documents:
    if file.suffix in (".jsonl", ".ndjson"):
        return _JsonLines(file, field)
    return _TextFiles([file], errors="strict")


def _folder(folder: Path, field: str) -> Documents:
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _SavedDataset(folder, field)
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix in (*_TEXT_SUFFIXES, ".jsonl", ".ndjson")
    )
    if not files:
        raise ValueError(
            f"data.path={str(folder)!r} is neither a dataset written by save_to_disk nor holds any "
            f"file of text ({', '.join(_TEXT_SUFFIXES)}) or .jsonl"
        )
    return _Concatenated([_file(file, field) for file in files])
