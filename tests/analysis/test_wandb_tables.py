"""What W&B gets beyond single numbers, and the dashboard as code."""

import json
import types

import pytest
import wandb_log
from made_up import make_record, make_search, make_timeline, write_all

from streambp.bench import dashboard, paper
from streambp.bench.config import TrackingConfig
from streambp.bench.tracking.wandb_tables import tables_of
from streambp.bench.tracking.wandb_tracker import WandbTracker

SECRET = "a-private-value-of-mine"


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
    assert table.plot.columns == {"x": "op_index", "y": "live_bytes", "stroke": "category"}
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


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """(record, its folder, what the real W&B stored offline) of a search with everything in it."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    method = {"name": "checkpointing"}
    record = make_search("max_seq_len_table", "seq_len", 15000, method=method)
    record.time = {"forward_backward_time_s_samples": [0.5, 0.25, 0.75]}
    record.overrides += [f"note={SECRET}", "data.path=hf_" + "a" * 30]
    write_all(tmp_path, [record])
    folder = record.path.parent
    (folder / "timeline.json").write_text(json.dumps(make_timeline()))
    tracker = WandbTracker(TrackingConfig(name="wandb", mode="offline"), folder)
    tracker.start(record)
    for step in (1, 2, 3):
        metrics = {"loss": 2.0 / step, "grad_norm": None}
        tracker.event({"event": "step", "step": step, "steps": 3, "metrics": metrics})
    tracker.finish(record)
    return record, folder, wandb_log.read(folder)


def test_the_real_wandb_stores_every_table_and_plot(stored):
    record, _, found = stored
    losses = [row["training/loss"] for row in found.history if "training/loss" in row]
    assert losses == [2.0, 1.0, 2.0 / 3]
    assert found.config["model"]["name"] == "qwen3_8b"
    assert found.summary["memory/peak_allocated_bytes"] == record.memory["peak_allocated_bytes"]
    assert found.summary["time/forward_backward_time_s_median"] == 0.5
    for key in ("time/samples", "memory/timeline", "search/probes", "paper/comparison"):
        columns, rows = found.table(key)
        wanted = tables_of(record, record.path.parent)[key]
        assert (tuple(columns), rows) == (wanted.columns, wanted.rows)
        assert any(f"{key}_plot" in str(row) for row in found.history), key
    columns, rows = found.table("paper/comparison")
    row = dict(zip(columns, rows[0], strict=True))
    assert (row["ours"], row["published"]) == (15000, 15700)


def test_no_secret_is_stored_anywhere(stored):
    _, folder, found = stored
    assert found.config["overrides"][-2:] == ["note=***", "data.path=***"]
    assert "environment" not in found.kinds  # it would hold the unmasked command line
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "record.json":
            assert SECRET.encode() not in path.read_bytes(), path


def test_the_dashboard_shows_what_is_logged(stored):
    """Panels of metrics that nobody logs would stay empty."""
    _, _, found = stored
    logged = {*found.summary, *(key for row in found.history for key in row)}
    logged |= {"training/grad_norm", "memory/peak_live_bytes"}  # other runs have them
    for section in dashboard.definition("p")["sections"]:
        for panel in section["panels"]:
            names = [panel.get("table_name"), *panel.get("metrics", ())]
            names += panel["y"] if isinstance(panel.get("y"), list) else [panel.get("y")]
            names.append(panel.get("query", {}).get("summaryTable", {}).get("tableKey"))
            for name in filter(None, names):
                assert name.removeprefix("summary.") in logged, name


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


def test_the_real_library_sends_every_panel_to_the_server(monkeypatch, capsys):
    """Up to the network: what wandb-workspaces would post is caught there."""
    reason = "the extra `dashboard` is not installed"
    internal = pytest.importorskip("wandb_workspaces.workspaces.internal", reason=reason)
    from wandb_workspaces.workspaces import interface

    posted = []

    def post(view):
        posted.append(view)
        return {"upsertView": {"view": {"id": "1", "name": view.name}}}

    monkeypatch.setattr(internal, "upsert_view2", post)
    monkeypatch.setattr(interface.Workspace, "url", property(lambda self: "https://w/me/mine"))
    monkeypatch.setattr(dashboard, "obstacle", lambda: None)
    assert dashboard.main(["--entity", "me", "--project", "mine"]) == 0
    assert "created: https://w/me/mine" in capsys.readouterr().out
    (view,) = posted
    assert (view.entity, view.project, view.display_name) == ("me", "mine", "streambp")
    sections = view.spec.section.panel_bank_config.sections
    wanted = dashboard.definition("mine")["sections"]
    assert [s.name for s in sections][: len(wanted)] == [s["name"] for s in wanted]
    for section, own in zip(sections, wanted, strict=False):
        assert len(section.panels) == len(own["panels"])
        for panel, values in zip(section.panels, own["panels"], strict=True):
            text = panel.model_dump_json(by_alias=True)
            metrics = [*values.get("metrics", ()), *(v for k in "xy" for v in _names(values, k))]
            for name in (*metrics, values.get("table_name"), values.get("title")):
                assert name is None or name in text, (name, text)


def _names(panel, axis):
    """The metrics of one axis of a panel as W&B spells them."""
    value = panel.get(axis) or []
    names = [value] if isinstance(value, str) else value
    prefixes = (("config.", "config:"), ("summary.", "summary:"))
    for old, new in prefixes:
        names = [new + n.removeprefix(old) if n.startswith(old) else n for n in names]
    return ["_step" if name == "Step" else name for name in names]


def test_obstacles_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "wandb-workspaces is not installed" in dashboard.obstacle()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "no key" in dashboard.obstacle()
