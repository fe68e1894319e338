"""The committed reference records are real and whole, and name no path of a machine."""

import re
import warnings
from pathlib import Path

import pytest

from analysis import load
from analysis.compare import comparison
from streambp.bench.records import RunRecord

REFERENCE = Path(__file__).resolve().parents[2] / "runs" / "reference"
FILES = {"record.json", "config.yaml", "timeline.json"}


@pytest.fixture(scope="module")
def records():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load.sound(load.records(REFERENCE))


def test_they_cover_simulated_and_measured_runs(records):
    rows = load.frame(records)
    assert {"simulated", "cpu"} <= set(rows["device"])
    assert {"bp_memory_figure", "max_seq_len_table", "linear_example"} <= set(rows["experiment"])
    assert set(rows["status"]) <= {"ok", "oom"}
    assert rows["timeline_path"].notna().sum() >= 2


def test_each_fingerprint_and_run_occurs_once(records):
    assert len({record.run_id for record in records}) == len(records)
    assert len({record.fingerprint for record in records}) == len(records)


def test_they_are_small_and_name_no_path(records):
    for record in records:
        assert record.path is not None
        for file in record.path.parent.iterdir():
            if file.name == "run.log":  # of a run made here; not committed
                continue
            assert file.name in FILES, file
            assert file.stat().st_size < 250_000, file
            absolute = re.search(r'["\s=](/(?!proc)\w+/[^"\s]*)', file.read_text())
            assert absolute is None, (file, absolute and absolute.group(1))
        assert isinstance(record, RunRecord)


@pytest.mark.parametrize("method", ["standard", "checkpointing"])
def test_simulated_baselines_meet_figure_3(records, method):
    numbers = comparison(records, "bp_memory_figure")
    own = numbers[(numbers["method"] == method) & (numbers["device"] == "simulated")]
    errors = (own["ratio"].dropna().astype(float) - 1).abs()
    assert len(errors) >= 4
    assert errors.max() < 0.01
