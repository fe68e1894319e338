"""Write every table as Markdown, CSV and LaTeX, and print the Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import command
from analysis.shown import Shown
from analysis.tables import write


def main(arguments: Sequence[str] | None = None) -> int:
    def work(found: Shown, out: Path, skipped: Sequence[str]) -> str:
        files = write(found.records, out)
        for path in files:
            if path.suffix == ".md":
                print(path.read_text(encoding="utf-8"))
        return command.files_line(files, out, found.records)

    return command.main(
        arguments,
        prog="python -m analysis.tables",
        description=__doc__,
        out=Path("tables"),
        work=work,
    )


if __name__ == "__main__":
    sys.exit(main())
