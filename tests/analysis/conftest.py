"""A runs folder with records of everything, made without running anything."""

import json

import pytest
from made_up import make_paper_records, make_record, make_timeline, write_all


@pytest.fixture(scope="session")
def paper_runs(tmp_path_factory):
    """A runs folder with records of all experiments, two failures, and two timelines."""
    root = tmp_path_factory.mktemp("runs")
    records = make_paper_records()
    failed = {"seq_len": 5000, "method": {"name": "checkpointing"}}
    records.append(make_record("bp_memory_figure", status="error", detail="it <broke>", **failed))
    records.append(make_record("default", status="killed", detail="signal 9"))
    records += [make_record("timeline", method={"name": name}) for name in ("standard", "streambp")]
    write_all(root, records)
    for record in records[-2:]:
        (record.path.parent / "timeline.json").write_text(json.dumps(make_timeline()))
    return root
