"""`python -m streambp.sim.fidelity [--tables NAME ...] [--write-to FOLDER]`: the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from streambp.sim.fidelity.checks import evaluate
from streambp.sim.fidelity.points import TABLES
from streambp.sim.fidelity.report import check_line, compute, point_line, write


def main() -> int:
    """Print every point and every bound; exit code 1 if a bound is not met."""
    parser = argparse.ArgumentParser(description="Published results beside their simulation.")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), help="default: all")
    parser.add_argument(
        "--write-to",
        type=Path,
        help="folder for the report's files; keeps the tables of an older one",
    )
    arguments = parser.parse_args()
    points = compute(arguments.tables, lambda point: print(point_line(point), flush=True))
    checks = evaluate(points)
    print(*map(check_line, checks), sep="\n")
    if arguments.write_to is not None:
        write(arguments.write_to, points)
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
