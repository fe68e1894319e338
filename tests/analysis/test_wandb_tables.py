"""What W&B gets beyond single numbers, and the dashboard as code."""

import json
import types

import pytest
from made_up import make_record, make_search, make_timeline, write_all

from streambp.bench import dashboard, paper
from streambp.bench.config import TrackingConfig
from streambp.bench.tracking.wandb_tables import tables_of
from streambp.bench.tracking.wandb_tracker import WandbTracker


def test_samples_and_comparison(tmp_path):
    record = make_record("bp_memory_figure", method={"name": "checkpointing"}, seq_len=20000)
    found = tables_of(record, tmp_path)
    assert set(found) == {"time/samples", "paper/comparison"}
    assert ["forward_time_s", 2] in [row[:2] for row in found["time/samples"].rows]
    table = found["paper/comparison"]
    assert table.columns == paper.COLUMNS
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["published"] == 77.0 * 2**30
    assert row["provenance"] == "simulated"


def test_timeline_by_category_is_thinned_and_keeps_the_peak(tmp_path):
    values = make_timeline(points=5000)
    (tmp_path / "timeline.json").write_text(json.dumps(values))
    table = tables_of(make_record(), tmp_path)["memory/timeline"]
    assert table.plot == ("op_index", "live_bytes", "category")
    categories = {row[2] for row in table.rows}
    assert categories == {*values["by_category_bytes"], "total"}
    total = [row[3] for row in table.rows if row[2] == "total"]
    assert len(total) <= 300
    assert max(total) == max(values["live_bytes"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"live_bytes": [1]}'])
def test_a_broken_timeline_is_no_table(tmp_path, text):
    (tmp_path / "timeline.json").write_text(text)
    assert "memory/timeline" not in tables_of(make_record(), tmp_path)


def test_probes_of_a_search(tmp_path):
    found = tables_of(make_search("max_seq_len_table", "seq_len", 72000), tmp_path)
    (row,) = found["search/probes"].rows
    assert row == ["seq_len", 0, 72000, True, 80 * 2**30, "simulated"]
    assert found["paper/comparison"].rows


def test_a_run_offline_with_the_real_wandb_has_the_tables(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a-private-value-of-mine")
    record = make_record("bp_memory_figure", method={"name": "checkpointing"}, seq_len=20000)
    record.overrides.append("note=a-private-value-of-mine")
    write_all(tmp_path, [record])
    folder = record.path.parent
    (folder / "timeline.json").write_text(json.dumps(make_timeline()))
    tracker = WandbTracker(TrackingConfig(name="wandb", mode="offline"), folder)
    logged = {}
    tracker.start(record)
    original = tracker._run.log
    monkeypatch.setattr(
        tracker._run, "log", lambda values, **kw: (logged.update(values), original(values, **kw))
    )
    tracker.event({"event": "step", "step": 1, "steps": 1, "metrics": {"loss": 2.0}})
    tracker.finish(record)
    tables = {key: value for key, value in logged.items() if isinstance(value, wandb.Table)}
    assert set(tables) == {"time/samples", "memory/timeline", "paper/comparison"}
    assert "memory/timeline_plot" in logged
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        if path.name not in ("record.json",):
            assert b"a-private-value-of-mine" not in path.read_bytes(), path


def test_the_definition_is_written_where_there_is_no_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dashboard, "obstacle", lambda: "no key")
    out = tmp_path / "d.json"
    assert dashboard.main(["--project", "mine", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "not created: no key" in said
    assert f"--definition {out}" in said
    values = json.loads(out.read_text())
    assert values == dashboard.definition("mine")
    logged = json.dumps(values)
    for key in ("training/loss", "memory/timeline", "paper/comparison", "search/probes"):
        assert key in logged


def test_a_server_that_cannot_be_reached_leaves_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dashboard, "obstacle", lambda: None)

    def refuse(values):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(dashboard, "workspace", refuse)
    out = tmp_path / "d.json"
    assert dashboard.main(["--entity", "me", "--out", str(out)]) == 0
    assert "no route to host" in capsys.readouterr().out
    assert json.loads(out.read_text())["entity"] == "me"


def test_a_definition_from_a_file_is_applied(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dashboard, "obstacle", lambda: None)
    saved = []
    workspace = types.SimpleNamespace(save=lambda: saved.append(1), url="https://somewhere")
    monkeypatch.setattr(dashboard, "workspace", lambda values: workspace)
    file = tmp_path / "d.json"
    file.write_text(json.dumps(dashboard.definition("p", "me")))
    assert dashboard.main(["--definition", str(file)]) == 0
    assert saved
    assert "created: https://somewhere" in capsys.readouterr().out
    file.write_text("{")
    assert dashboard.main(["--definition", str(file)]) == dashboard.EXIT_NOT_APPLIED


def test_panels_become_those_of_wandb_workspaces():
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    built = dashboard.workspace(dashboard.definition("p", "me"))
    kinds = [type(panel).__name__ for section in built.sections for panel in section.panels]
    wanted = [p["kind"] for s in dashboard.definition("p")["sections"] for p in s["panels"]]
    assert kinds == wanted


def test_obstacles_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "wandb-workspaces is not installed" in dashboard.obstacle()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "no key" in dashboard.obstacle()
