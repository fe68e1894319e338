"""The command line that the tables, the plots and the report share: folders in, files out."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from analysis.shown import Shown, shown
from streambp.bench.records import RunRecord

Work = Callable[[Shown, Path, list[str]], str]


def main(
    arguments: Sequence[str] | None, *, prog: str, description: str | None, out: Path, work: Work
) -> int:
    """Read the records of the folders on the command line and hand them to `work`.

    Files that are no records are named on stderr, one line each. `work(shown, out, those
    lines)` writes below `out` and returns what to print at the end; what `shown` has to say about
    itself comes after it. The exit code is 2 when a folder is missing or cannot be written.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with records (runs)")
    parser.add_argument("-o", "--out", type=Path, default=out, help=f"where to write ({out})")
    options = parser.parse_args(arguments)
    skipped: list[str] = []
    try:
        with _said(skipped):
            found = shown(*options.runs)
        with _said([]):
            print(work(found, options.out, skipped))
        if found.note:
            print(found.note)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def files_line(files: Sequence[Path], out: Path, found: Sequence[RunRecord]) -> str:
    """What was written, or that there was nothing to write."""
    if files:
        return f"{len(files)} files in {out}, from {len(found)} records"
    return (
        f"nothing to write: none of {len(found)} records is of an experiment of the paper. "
        "Fix: python run.py -m experiment=bp_memory_figure"
    )


@contextmanager
def _said(skipped: list[str]) -> Iterator[None]:
    """Print the warnings about files that were skipped, a line each, and add them to `skipped`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message).encode("utf-8", "backslashreplace").decode() for one in caught]
    found = [text for text in texts if text.startswith("skipped ")]
    for text in found:
        print(f"warning: {text}", file=sys.stderr)
    skipped += found
