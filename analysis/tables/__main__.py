"""Write every table as Markdown, CSV and LaTeX, and print the Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import command
from analysis.tables import write
from streambp.bench.records import RunRecord


def main(arguments: Sequence[str] | None = None) -> int:
    def work(found: Sequence[RunRecord], out: Path, skipped: Sequence[str]) -> str:
        files = write(found, out)
        for path in files:
            if path.suffix == ".md":
                print(path.read_text(encoding="utf-8"))
        return command.files_line(files, out, found)

    return command.main(
        arguments,
        prog="python -m analysis.tables",
        description=__doc__,
        out=Path("tables"),
        work=work,
    )


if __name__ == "__main__":
    sys.exit(main())
