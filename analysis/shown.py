"""Which records a page, a table or a notebook shows: your own, else the committed reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.load import records, sound
from streambp.bench.records import RunRecord

REFERENCE = "reference"  # the folder below `runs` with the records that the project commits


@dataclass(frozen=True)
class Shown:
    """Records that can be read. `note` says so where they are not the reader's own."""

    records: list[RunRecord]
    note: str | None = None


def shown(*roots: Path | str) -> Shown:
    """The records below the folders, without the project's reference records.

    Those stand in where there are no others, with a note. Naming their folder shows them, too.

    Raises:
        FileNotFoundError: a root does not exist; the message names it and the fix.
    """
    references = [folder for root in roots if _is_reference(folder := Path(root) / REFERENCE)]
    own = sound(records(*(part for root in roots for part in _own(Path(root)))))
    if own or not references:
        return Shown(own)
    note = (
        f"Nothing was run here yet: these are the project's reference records "
        f"({', '.join(map(str, references))}), not yours."
    )
    return Shown(sound(records(*references)), note)


def _is_reference(folder: Path) -> bool:
    """True for the committed records; an experiment may be called the same, but has no README."""
    return (folder / "README.md").is_file()


def _own(root: Path) -> list[Path]:
    """The folder, or what lies in it beside the reference records."""
    if not _is_reference(root / REFERENCE):
        return [root]
    return sorted(p for p in root.iterdir() if p.is_dir() and p.name != REFERENCE)
