"""Records are written whole and once; reading never trips over what is not one."""

import json
import os
import threading

import pytest

from streambp.bench import environment, records
from streambp.bench.config import ConfigError
from streambp.bench.records import RecordError, RunRecord, iter_records


def make_record(**changes):
    values = {
        "run_id": "abc",
        "fingerprint": "f" * 64,
        "experiment": "default",
        "job": "job",
        "status": "ok",
        "started_at": "2030-01-01T00:00:00+00:00",
        "finished_at": "2030-01-01T00:00:01+00:00",
        "config": {"seq_len": 8},
    }
    return RunRecord(**{**values, **changes})


def test_write_and_load(tmp_path):
    record = make_record(training={"loss_per_step": [1.5]}, notes=["one"])
    record.write(tmp_path)
    assert RunRecord.load(tmp_path) == record
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_record_is_never_overwritten(tmp_path):
    make_record(run_id="first").write(tmp_path)
    with pytest.raises(FileExistsError):
        make_record(run_id="second").write(tmp_path)
    assert RunRecord.load(tmp_path).run_id == "first"
    assert os.listdir(tmp_path) == ["record.json"]


def test_of_many_writers_exactly_one_wins(tmp_path):
    won = []

    def write(number):
        try:
            make_record(run_id=str(number)).write(tmp_path)
            won.append(str(number))
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert RunRecord.load(tmp_path).run_id == won[0]


def test_without_hard_links_the_record_is_still_whole_and_kept(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(records.os, "link", no_links)
    make_record(run_id="first").write(tmp_path)
    with pytest.raises(FileExistsError):
        make_record(run_id="second").write(tmp_path)
    assert RunRecord.load(tmp_path).run_id == "first"
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make_record().write(tmp_path)
    assert os.listdir(tmp_path) == []


def test_numbers_that_are_not_finite_become_null_with_a_note(tmp_path):
    losses = [1.0, float("nan"), float("inf")]
    make_record(training={"loss_per_step": losses}).write(tmp_path)
    loaded = RunRecord.load(tmp_path)
    assert loaded.training == {"loss_per_step": [1.0, None, None]}
    assert "training.loss_per_step[1]" in loaded.notes[-1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a readable record"),
        ("[1]", "no schema_version"),
        ('{"hello": 1}', "no schema_version"),
        ('{"schema_version": 0}', "schema version 0"),
        ('{"schema_version": 1}', "'run_id' is missing"),
    ],
)
def test_foreign_files_are_skipped_with_a_warning_that_names_them(tmp_path, text, reason):
    (tmp_path / "a" / "bad").mkdir(parents=True)
    (tmp_path / "a" / "good").mkdir()
    (tmp_path / "a" / "bad" / "record.json").write_text(text)
    make_record().write(tmp_path / "a" / "good")
    with pytest.warns(UserWarning, match="skipped") as caught:
        found = list(iter_records(tmp_path))
    assert [record.run_id for record in found] == ["abc"]
    assert "bad/record.json" in str(caught[0].message)
    assert reason in str(caught[0].message)
    with pytest.raises(RecordError, match=r"bad/record\.json"):
        RunRecord.load(tmp_path / "a" / "bad")


def test_fields_of_the_wrong_type_are_refused(tmp_path):
    values = json.loads(make_record().to_json())
    for name, wrong in (("status", "fine"), ("config", []), ("training", 3), ("notes", None)):
        (tmp_path / "record.json").write_text(json.dumps({**values, name: wrong}))
        with pytest.raises(RecordError, match=name):
            RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("git", {"commit": ["x"]}),
        ("git", {"dirty": "yes"}),
        ("versions", {"torch": 2}),
        ("provenance", {"memory": ["measured"]}),
        ("overrides", [["seq_len=3"]]),
        ("notes", [3]),
        ("config", {"model": {"name": 3}}),
        ("config", {"seq_len": "8"}),
        ("memory", {"peak_live_bytes": "many"}),
        ("time", {"forward_time_s_samples": ["fast"]}),
        ("training", {"loss_per_step": 3}),
        ("search", {"largest": "8"}),
        ("job", "m\ud800x"),
        ("config", {"m\ud800x": 1}),
    ],
)
def test_values_that_readers_cannot_use_are_refused(tmp_path, name, wrong):
    values = json.loads(make_record().to_json())
    (tmp_path / "record.json").write_text(json.dumps({**values, name: wrong}))
    with pytest.raises(RecordError, match=r"record\.json: "):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize("depth", [300, 200_000])
def test_deeply_nested_files_are_refused(tmp_path, depth):
    text = (
        make_record()
        .to_json()
        .replace('"config": {', f'"config": {{"x": {"[" * depth}{"]" * depth},')
    )
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RecordError, match=r"record\.json: "):
        RunRecord.load(tmp_path)


def test_fingerprint_ignores_order_and_launch_settings_and_sees_the_rest(monkeypatch, tmp_path):
    config = {"seq_len": 8, "model": {"name": "a", "x": 1}, "experiment": {"name": "e"}}
    same = {"model": {"x": 1, "name": "a"}, "experiment": {"name": "e"}, "seq_len": 8}
    first = environment.fingerprint(config)
    assert environment.fingerprint(same) == first
    launch = {"force": True, "runs_dir": "elsewhere", "timeout_s": 3, "tracking": {"name": "wandb"}}
    assert environment.fingerprint({**config, **launch}) == first
    described = {**config, "experiment": {"name": "e", "description": "words"}}
    assert environment.fingerprint(described) == first
    assert environment.fingerprint({**config, "seq_len": 9}) != first
    text = tmp_path / "text.txt"
    text.write_text("one")
    before = environment.fingerprint({**config, "data": {"path": str(text)}})
    text.write_text("one two")
    assert environment.fingerprint({**config, "data": {"path": str(text)}}) != before
    monkeypatch.setattr(environment, "code_version", lambda: "other")
    assert environment.fingerprint(config) != first


def test_fingerprint_sees_the_contents_of_inputs(monkeypatch, tmp_path):
    def fingerprint(path):
        return environment.fingerprint({"data": {"path": str(path)}})

    text = tmp_path / "text.txt"
    text.write_text("one")
    kept = (text.stat().st_atime_ns, text.stat().st_mtime_ns)
    first, folder = fingerprint(text), fingerprint(tmp_path)
    os.utime(text)
    assert fingerprint(text) == first  # touched, not changed
    changed = tmp_path / "changed"
    changed.write_text("two")  # as long, and as old
    os.utime(changed, ns=kept)
    changed.replace(text)
    assert fingerprint(text) != first
    assert fingerprint(tmp_path) != folder


@pytest.mark.parametrize("place", [0, 15, -1])
def test_fingerprint_sees_changes_of_large_files(monkeypatch, tmp_path, place):
    monkeypatch.setattr(environment, "_WHOLE_FILE_BYTES", 20)
    monkeypatch.setattr(environment, "_END_BYTES", 4)
    file = tmp_path / "model.safetensors"
    content = bytearray(range(30))
    file.write_bytes(content)
    config = {"data": {"tokenizer": str(tmp_path)}}
    first = environment.fingerprint(config)
    time = file.stat().st_mtime_ns
    content[place] += 100
    file.write_bytes(content)
    # The middle is not read: there the time of the change tells.
    os.utime(file, ns=(time, time + (place == 15)))
    environment._hash_of.cache_clear()
    assert environment.fingerprint(config) != first


def test_an_input_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "some.txt")

    monkeypatch.setattr(environment, "_hash", refuse)
    (tmp_path / "some.txt").write_text("one")
    with pytest.raises(ConfigError, match=r"data\.path=.*some\.txt can't be read"):
        environment.fingerprint({"data": {"path": str(tmp_path)}})


def test_environment_says_what_is_known():
    found = environment.versions()
    assert found["torch"] and found["transformers"] and found["python"]
    machine = environment.hardware()
    assert machine["cpu_cores"] >= 1 and machine["memory_bytes"] > 2**20
    assert machine["gpus"] is None or machine["gpus_unavailable"] is None
    assert set(environment.git_state()) == {"commit", "dirty"}
