"""The baselines on transformers 4.51.3, which the paper ran: too old to stream, not to simulate.

It needs an environment of its own, in which only the baselines run:

    python -m venv paper && paper/bin/pip install "transformers==4.51.3" torch peft pyyaml
    paper/bin/python -m streambp.sim.fidelity --tables figure3 table3 table9
    STREAMBP_PAPER_PYTHON=paper/bin/python python -m pytest tests/sim/test_paper_transformers.py

`--write-to runs/reference/paper_fidelity_transformers_4.51.3` writes the committed report.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streambp.published import load
from streambp.sim.fidelity.checks import evaluate
from streambp.sim.fidelity.report import read
from streambp.sim.fidelity.settings import BASELINES

VARIABLE = "STREAMBP_PAPER_PYTHON"
ROOT = Path(__file__).parents[2]
REPORT = ROOT / "runs" / "reference" / "paper_fidelity_transformers_4.51.3"
WORST = {"figure3": 0.0025, "table3": 0.06, "table9": 0.012}

#: Its own mask, from a batch with padding, is the one mask of the figure's assumptions.
SAME_MASK = """
import dataclasses
from streambp.sim.fidelity.settings import workload
from streambp.sim.settings import PAPER
from streambp.sim.simulation import simulate
cell = workload("qwen3_8b", "full", "checkpointing", 3000)
for mask in ("additive", "padding"):
    assumptions = dataclasses.replace(PAPER, mask=mask)
    print(simulate(cell.replace(assumptions=assumptions)).peak_bytes)
"""

#: A baseline with the modules that need a newer transformers out of reach.
WITHOUT_STREAMING = """
import sys
for name in ("model", "attention", "layer", "head"):
    sys.modules[f"streambp.{name}"] = None
from streambp.sim.fidelity.settings import workload
from streambp.sim.simulation import simulate
for method in ("standard", "checkpointing"):
    print(simulate(workload("qwen3_8b", "full", method, 64)).peak_bytes)
"""


def test_the_committed_report_meets_every_baseline():
    points = read(REPORT)
    assert all(point.method in BASELINES for point in points)
    assert all(check.ok for check in evaluate(points))
    for table, source in (
        ("figure3", "bp_memory_figure"),
        ("table3", "max_seq_len_table3"),
        ("table9", "other_models_table9"),
    ):
        chosen = [point for point in points if point.table == table]
        assert {p.model for p in chosen} == {r["model"] for r in load(source)}
        assert max(abs(point.error) for point in chosen) < WORST[table]
    assert len([p for p in points if p.table == "figure3"]) == 42
    assert "transformers 4.51.3" in (REPORT / "report.md").read_text(encoding="utf-8")


def test_the_baselines_import_no_streaming_code():
    result = _run(sys.executable, ["-c", WITHOUT_STREAMING])
    standard, checkpointing = map(int, result.stdout.split())
    assert standard > checkpointing > 30 * 2**30


@pytest.fixture(scope="module")
def paper_python():
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter with transformers 4.51.3")
    version = _run(python, ["-c", "import transformers; print(transformers.__version__)"])
    assert version.stdout.strip() == "4.51.3"
    return python


def test_figure_3_on_the_papers_transformers(paper_python, tmp_path):
    command = ["-m", "streambp.sim.fidelity", "--tables", "figure3", "--write-to", str(tmp_path)]
    _run(paper_python, command)
    points = read(tmp_path)
    assert len(points) == 42
    assert max(abs(point.error) for point in points) < WORST["figure3"]
    assert points == [point for point in read(REPORT) if point.table == "figure3"]


def test_a_padded_batch_makes_the_mask_that_is_assumed(paper_python):
    given, made = map(int, _run(paper_python, ["-c", SAME_MASK]).stdout.split())
    assert made == pytest.approx(given, rel=1e-5)


def _run(python, arguments):
    result = subprocess.run(
        [python, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result
