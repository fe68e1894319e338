"""Reads the published tables. Their cells are text: an empty one means "does not fit"."""

from __future__ import annotations

import csv
from pathlib import Path

_FOLDER = Path(__file__).parent


def load(name: str) -> list[dict[str, str]]:
    """The rows of `<name>.csv`, without its comments.

    Raises:
        ValueError: no such table; lists the known ones.
    """
    lines = [line for line in _lines(name) if not line.startswith("#")]
    return list(csv.DictReader(lines))


def source(name: str) -> str:
    """The comments at the head of `<name>.csv`: where its numbers are from, how they were read."""
    lines = [line for line in _lines(name) if line.startswith("#")]
    return "\n".join(line.lstrip("# ").rstrip() for line in lines)


def _lines(name: str) -> list[str]:
    path = _FOLDER / f"{name}.csv"
    if not path.is_file():
        known = sorted(path.stem for path in _FOLDER.glob("*.csv"))
        raise ValueError(f"no published table {name!r}. Known: {', '.join(known)}")
    return path.read_text(encoding="utf-8").splitlines()
