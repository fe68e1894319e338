"""The notebooks are stored without outputs and run on the reference records and on fresh ones."""

from pathlib import Path

import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "analysis").glob("*.ipynb"))
REFERENCE = ROOT / "runs" / "reference"


def execute(path, runs, monkeypatch):
    """The executed notebook and all its text output."""
    monkeypatch.setenv("STREAMBP_RUNS", str(runs))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": ROOT}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return outputs


def kinds(outputs):
    return [kind for output in outputs for kind in output.get("data", {})]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["figures", "tables"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_stored(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run_on_fresh_records(path, paper_runs, monkeypatch):
    found = kinds(execute(path, paper_runs, monkeypatch))
    if path.stem == "figures":
        assert found.count("image/png") >= 9 + 2
    else:
        assert found.count("text/markdown") >= 9


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run_on_the_reference_records(path, monkeypatch):
    found = kinds(execute(path, REFERENCE, monkeypatch))
    assert found.count("image/png" if path.stem == "figures" else "text/markdown") >= 7
