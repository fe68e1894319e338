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

__all__ = [
    "Documents",
    "TextFiles",
    "documents_of",
    "is_jsonl",
    "is_saved_dataset",
    "text_files",
    "text_of_line",
]

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
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


class TextFiles:
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
                    text_of_line(file, field, line, number)
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> str:
        with self._file.open("rb") as lines:
            lines.seek(self._offsets[index])
            return text_of_line(self._file, self._field, lines.readline(), number=None)


def text_of_line(file: Path, field: str, line: bytes, number: int | None) -> str:
    """The text of one line of JSONL. ``ValueError`` names the line, the key and the fix."""
    where = f"data.path: {file}, line {number}"
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): fix or remove the line") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} is no JSON object: expected one with the key {field!r}")
    if field not in values:
        keys = ", ".join(map(repr, values)) or "no key"
        raise ValueError(f"{where} has no key {field!r}, it has {keys}: set data.text_field")
    text = values[field]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: {field!r} holds {type(text).__name__}, not text: set data.text_field"
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
    return TextFiles(files, errors="replace")


def _file(file: Path, field: str) -> Documents:
    if is_jsonl(file):
        return _JsonLines(file, field)
    return TextFiles([file], errors="strict")


def _folder(folder: Path, field: str) -> Documents:
    if is_saved_dataset(folder):
        return _SavedDataset(folder, field)
    return _Concatenated([_file(file, field) for file in text_files(folder)])


def is_jsonl(file: Path) -> bool:
    """Whether a file has a JSON object in each line, by its name."""
    return file.suffix in _JSONL_SUFFIXES


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``datasets`` wrote the folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def text_files(folder: Path) -> list[Path]:
    """The files of text and JSONL below a folder; ``ValueError`` when there are none."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix in (*_TEXT_SUFFIXES, *_JSONL_SUFFIXES)
    )
    if not files:
        raise ValueError(
            f"data.path={str(folder)!r} is neither a dataset written by save_to_disk nor holds any "
            f"file of text ({', '.join(_TEXT_SUFFIXES)}) or .jsonl"
        )
    return files
