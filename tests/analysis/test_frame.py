"""Records become rows with units and provenance; what is no record is named and skipped."""

import json
import shutil
import warnings

import pytest
from made_up import GIB, make_record, make_search, make_timeline, write_all

from analysis import load


def test_a_row_holds_what_the_record_says(tmp_path):
    record = make_record("exp", seq_len=2000, method={"name": "streambp", "chunk_size": 64})
    write_all(tmp_path, [record])
    (row,) = load.load(tmp_path).to_dict("records")
    assert row["variant"] == "streambp (chunk 64)"
    assert row["seq_len_tokens"] == 2000
    assert row["peak_bytes"] == record.memory["peak_allocated_bytes"]
    assert row["peak_kind"] == "allocated"
    assert row["forward_backward_time_s"] == pytest.approx(2000 * 3.6e-4)
    assert row["time_samples"] == 3
    assert (row["provenance_memory"], row["provenance_time"]) == ("simulated", "predicted")
    assert row["device_label"] == "A800 80GB (simulated)"
    assert row["version_torch"] == "2.13.0"
    assert row["path"] == str(record.path)
    assert list(row) == list(load.COLUMNS)


def test_unknown_is_none_never_zero(tmp_path):
    write_all(tmp_path, [make_record(status="killed")])
    (row,) = load.load(tmp_path).to_dict("records")
    for name in ("peak_bytes", "forward_backward_time_s", "weights_bytes", "loss_first"):
        assert row[name] is None or row[name] != row[name], name


def test_devices_are_named_for_captions(tmp_path):
    gpu = make_record(device={"name": "cuda"})
    gpu.hardware["gpus"] = [{"name": "NVIDIA H200", "memory_bytes": 1}]
    write_all(tmp_path, [gpu, make_record(device={"name": "cpu"})])
    rows = load.load(tmp_path)
    assert set(rows["device_label"]) == {"NVIDIA H200", "CPU (Some CPU, 2 cores)"}
    assert set(rows["peak_kind"]) == {"allocated", "live"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "\x00\xff",
        '{"schema_version": 0, "status": "ok"}',
        '{"schema_version": 99}',
        '{"some": "other json"}',
    ],
)
def test_what_is_no_record_is_skipped_and_named(tmp_path, text):
    write_all(tmp_path, [make_record("exp")])
    foreign = tmp_path / "exp" / "foreign"
    foreign.mkdir()
    (foreign / "record.json").write_text(text, encoding="latin-1")
    with pytest.warns(UserWarning, match=str(foreign / "record.json")):
        rows = load.load(tmp_path)
    assert len(rows) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v["config"].pop("model"),
        lambda v: v["config"].update(method="streambp"),
        lambda v: v.update(memory={"peak_allocated_bytes": "much"}),
        lambda v: v["config"].pop("experiment"),
        lambda v: v["config"].update(seq_len="long"),
        lambda v: v.update(time={"forward_time_s_samples": [1, "two"]}),
        lambda v: v.update(search=7),
    ],
)
def test_a_record_with_malformed_insides_is_skipped_and_named(tmp_path, damage):
    good, bad = make_record("exp"), make_record("exp")
    write_all(tmp_path, [good, bad])
    values = json.loads(bad.path.read_text())
    damage(values)
    bad.path.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match=str(bad.path)):
        rows = load.load(tmp_path)
    assert list(rows["run_id"]) == [good.run_id]


def test_an_unreadable_record_is_skipped_and_named(tmp_path):
    write_all(tmp_path, [make_record("exp")])
    (tmp_path / "exp" / "folder" / "record.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"folder/record\.json"):
        assert len(load.load(tmp_path)) == 1


def test_a_missing_folder_is_an_error_with_a_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*Fix: run an experiment"):
        load.records(tmp_path / "nowhere")


def test_no_records_give_an_empty_frame(tmp_path):
    assert load.load(tmp_path).empty


def test_roots_may_overlap(tmp_path):
    write_all(tmp_path, [make_record("a"), make_record("b")])
    assert len(load.records(tmp_path, tmp_path / "a")) == 2


def test_the_newest_answer_counts(tmp_path):
    first, second, error = make_record(), make_record(), make_record(status="error")
    rows = load.newest(load.frame([first, second, error]), ["model", "seq_len_tokens"])
    assert list(rows["run_id"]) == [second.run_id]


def test_searches_have_their_columns(tmp_path):
    (row,) = load.frame([make_search("x", "seq_len", 72000)]).to_dict("records")
    assert (row["search_parameter"], row["search_outcome"]) == ("seq_len", "found")
    assert (row["search_largest"], row["search_smallest_failing"]) == (72000, 72008)
    assert row["provenance_search"] == "simulated"


def test_timelines_are_checked(tmp_path):
    record = make_record("exp")
    write_all(tmp_path, [record])
    with pytest.raises(FileNotFoundError, match=r"measure\.timeline=true"):
        load.timeline(record)
    file = record.path.parent / "timeline.json"
    good = make_timeline()
    file.write_text(json.dumps(good))
    assert load.timeline(record) == good
    assert load.timeline(record.path.parent) == good
    for damage in ({"live_bytes": []}, {"by_category_bytes": {"kv": [1]}}, {"phase": ["x"]}):
        file.write_text(json.dumps({**good, **damage}))
        with pytest.raises(ValueError, match=r"timeline\.json: not a memory timeline"):
            load.timeline(record)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"timeline\.json: not a memory timeline"):
        load.timeline(record)


def test_the_row_of_a_large_folder_warns_nothing(paper_runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(paper_runs, copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = load.load(copy)
    assert rows["peak_bytes"].dropna().min() > GIB
