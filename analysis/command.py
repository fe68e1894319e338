"""The command line that the tables, the plots and the report share: folders in, files out."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.load import records, sound
from streambp.bench.records import RunRecord

Work = Callable[[list[RunRecord], Path, list[str]], str]


def main(
    arguments: Sequence[str] | None, *, prog: str, description: str | None, out: Path, work: Work
) -> int:
    """Read the records of the folders on the command line and hand them to `work`.

    Files that are no records are named on stderr, one line each. `work(records, out, those
    lines)` writes below `out` and returns what to print at the end. The exit code is 2 when a
    folder is missing or cannot be written.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("runs", nargs="*", default=["runs"], help="folders with records")
    parser.add_argument("-o", "--out", type=Path, default=out, help=f"where to write ({out})")
    options = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = sound(records(*options.runs))
        skipped = [str(one.message) for one in caught if str(one.message).startswith("skipped ")]
        for text in skipped:
            print(f"warning: {text}", file=sys.stderr)
        print(work(found, options.out, skipped))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
