"""What was run here is shown alone; the committed reference records stand in, and say so."""

import json
import re
import shutil
from pathlib import Path

import pytest
from made_up import make_record, write_all

from analysis import report
from analysis.plots.__main__ import main as plots_main
from analysis.shown import shown
from analysis.tables.__main__ import main as tables_main

ANALYSIS = Path(__file__).resolve().parents[2] / "analysis"
NOTE = "these are the project's reference records"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """`runs` of a clone below the current folder: the reference alone, two records."""
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path / "runs/reference", [make_record("bp_memory_figure") for _ in range(2)])
    (tmp_path / "runs/reference/README.md").write_text("Reference records\n")
    return Path("runs")


@pytest.mark.parametrize("main", [report.main, tables_main, plots_main])
def test_without_own_records_the_reference_is_shown_and_named(runs, main, capsys):
    assert main(["-o", "out"]) == 0
    said = capsys.readouterr().out
    assert said.count(NOTE) == 1
    assert str(runs / "reference") in said


def test_own_records_are_shown_alone(runs, capsys):
    own = make_record("bp_time_table")
    write_all(runs, [own])
    assert [record.run_id for record in shown(runs).records] == [own.run_id]
    assert report.main(["-o", "page.html"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<p>1 runs" in page
    assert NOTE not in page + capsys.readouterr().out


def test_the_page_says_whose_records_it_shows(runs):
    assert report.main(["-o", "page.html"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert re.search(r"<p class=note>[^<]*these are the project&#x27;s reference records", page)
    assert "<p>2 runs" in page


def test_the_reference_is_shown_to_who_names_it(runs):
    write_all(runs, [make_record("bp_time_table")])
    found = shown(runs / "reference")
    assert (len(found.records), found.note) == (2, None)
    assert len(shown(runs, runs / "reference").records) == 3


def test_own_records_that_cannot_be_read_leave_the_reference(runs):
    broken = make_record("bp_time_table")
    write_all(runs, [broken])
    broken.path.write_text("{")
    with pytest.warns(UserWarning, match=str(broken.path)):
        found = shown(runs)
    assert len(found.records) == 2
    assert NOTE in found.note


def test_an_experiment_of_that_name_is_ones_own(runs):
    shutil.rmtree(runs / "reference")
    write_all(runs, [make_record("reference")])
    assert len(shown(runs).records) == 1
    assert shown(runs).note is None


@pytest.mark.parametrize("name", ["figures", "tables"])
def test_the_notebooks_follow_the_same_rule(name):
    cells = json.loads((ANALYSIS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "found = shown(runs)" in code
    assert "found.note" in code
    assert '"reference"' not in code
