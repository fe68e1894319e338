"""The notebooks are stored without outputs and run on the reference records and on fresh ones.

Fresh: of a sweep that the tests have just run."""

import asyncio
import os
from pathlib import Path

import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "analysis").glob("*.ipynb"))
REFERENCE = ROOT / "runs" / "reference"


@pytest.fixture(scope="module")
def executed(real_sweep):
    """(notebook, "fresh" or "reference") -> its outputs. Two run at a time: each is a process."""
    runs = {"fresh": real_sweep.runs_dir, "reference": REFERENCE}
    found = {}

    async def execute(path, which, limit):
        notebook = nbformat.read(path, as_version=4)
        environment = {**os.environ, "STREAMBP_RUNS": str(runs[which])}
        client = nbclient.NotebookClient(
            notebook, timeout=240, resources={"metadata": {"path": ROOT}}
        )
        async with limit:
            await client.async_execute(env=environment)
        found[path.stem, which] = [o for cell in notebook.cells for o in cell.get("outputs", [])]

    async def execute_all():
        limit = asyncio.Semaphore(2)
        await asyncio.gather(*(execute(path, w, limit) for w in runs for path in NOTEBOOKS))

    asyncio.run(execute_all())
    return found


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


def test_they_run_on_the_records_of_a_sweep_just_made(executed):
    figures = kinds(executed["figures", "fresh"])
    assert figures.count("image/png") == 1 + 2  # figure 3, and a timeline of each run
    assert kinds(executed["tables", "fresh"]).count("text/markdown") >= 1


def test_they_run_on_the_reference_records(executed):
    assert kinds(executed["figures", "reference"]).count("image/png") >= 7
    assert kinds(executed["tables", "reference"]).count("text/markdown") >= 7
