"""The committed report keeps its bounds, and its points are what the simulation gives today."""

import dataclasses
from pathlib import Path

import pytest

from streambp.bench.config import RunConfig
from streambp.bench.progress import Progress
from streambp.published import load, source
from streambp.sim.fidelity import settings
from streambp.sim.fidelity.checks import evaluate
from streambp.sim.fidelity.points import table8
from streambp.sim.fidelity.report import compute, read, run, write
from streambp.sim.simulation import simulate

REPORT = Path(__file__).parents[2] / "runs" / "reference" / "paper_fidelity"
GIB = 2**30


def test_every_bound_of_the_committed_report_is_met():
    points = read(REPORT)
    assert {p.table for p in points} >= {"figure3", "figure3_maxima", "table3", "table8", "table9"}
    checks = evaluate(points)
    assert len(checks) > 20
    assert [check.name for check in checks if not check.ok] == []


def test_streaming_needs_no_more_than_the_published_curve_at_any_length():
    """Without the reading error of the curve, which the bounds of the report allow."""
    curves = [p for p in read(REPORT) if p.method == "streambp" and p.quantity == "peak_gib"]
    assert {p.table for p in curves} == {"figure3", "table9"}
    assert [p for p in curves if p.simulated > p.published] == []


def test_the_committed_report_has_every_published_point():
    points = read(REPORT)
    rows = [row for row in load("bp_memory_figure") if row["method"] != "weights_and_grads"]
    assert len([p for p in points if p.table == "figure3"]) == len(rows)
    rows = [r for r in load("max_seq_len_table3") if r["objective"] == "sft" and r["max_seq_len"]]
    assert len([p for p in points if p.table == "table3"]) == len(rows)
    assert len([p for p in points if p.table == "table8"]) == 2 * len(load("linear_example_table8"))


@pytest.mark.parametrize(
    ("model", "tuning", "method", "seq_len"),
    [
        ("qwen3_8b", "full", "standard", 4700),
        ("qwen3_8b", "full", "checkpointing", 20000),
        ("qwen3_14b", "full", "checkpointing", 9000),
        ("qwen3_32b", "lora", "standard", 440),
        ("qwen3_8b", "full", "streambp", 5000),
        ("qwen3_8b", "full", "streambp", 40000),
        ("qwen3_14b", "full", "streambp", 1000),
    ],
)
def test_points_of_the_committed_report_are_reproduced(model, tuning, method, seq_len):
    point = next(
        p
        for p in read(REPORT)
        if (p.table, p.model, p.method, p.x) == ("figure3", model, method, seq_len)
    )
    peak = simulate(settings.workload(model, tuning, method, seq_len)).peak_bytes
    assert peak / GIB == pytest.approx(point.simulated, rel=2e-3)


def test_the_linear_example_is_met_today():
    assert max(abs(point.error) for point in table8()) < 0.01


def test_a_report_is_written_and_read_back(tmp_path):
    points = compute(["table8"])
    write(tmp_path, points)
    assert read(tmp_path) == points
    changed = [dataclasses.replace(points[0], simulated=0.0)]
    write(tmp_path, changed)  # other points stay
    assert read(tmp_path) == [*changed, *points[1:]]
    text = (tmp_path / "report.md").read_text()
    assert "simulated" in text and "Assumptions" in text


def test_a_run_prints_every_point_and_every_bound():
    config = RunConfig.from_dict(
        {
            "model": {"name": "small", "config": {"model_type": "qwen3"}},
            "method": {"name": "standard"},
            "experiment": {
                "name": "paper_fidelity",
                "kind": "fidelity",
                "options": {"tables": ["table8"]},
            },
        }
    )
    benchmark = run(config, Progress())["benchmark"]
    assert len(benchmark["points"]) == 12
    title, *lines, check, end = benchmark["summary"]
    assert len(lines) == 12
    assert all("published" in line and "simulated" in line and "%" in line for line in lines)
    assert "simulated" in title
    assert check.startswith("ok") and "table 8, worst error" in check and "at most 0.01" in check
    assert end.startswith("1 of 1 bounds met, 12 points")


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="tables='table7'"):
        compute(["table7"])
    with pytest.raises(ValueError, match="no published table 'table0'"):
        load("table0")


def test_published_tables_name_their_source():
    for table in ("bp_memory_figure", "max_seq_len_table3", "other_models_table9"):
        assert "arXiv" in source(table)
