"""Write every picture, and a timeline for each run that stored one, as PNG, SVG and PDF."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import command
from analysis.plots import write
from analysis.shown import Shown


def main(arguments: Sequence[str] | None = None) -> int:
    def work(found: Shown, out: Path, skipped: Sequence[str]) -> str:
        return command.files_line(write(found.records, out), out, found.records)

    return command.main(
        arguments,
        prog="python -m analysis.plots",
        description=__doc__,
        out=Path("plots"),
        work=work,
    )


if __name__ == "__main__":
    sys.exit(main())
