"""Whatever happens to a worker becomes a record; finished runs are not done again."""

import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from streambp.bench import folders, runner
from streambp.bench.config import ConfigError, ExperimentConfig
from streambp.bench.folders import RunsFolderError, attempts
from streambp.bench.preflight import resolve
from streambp.bench.records import RunRecord
from streambp.bench.runner import run_job
from streambp.bench.worker import is_out_of_memory

pytestmark = pytest.mark.usefixtures("fake_worker")


def test_a_run_leaves_its_config_its_log_and_its_record(make_config):
    outcome = run_job(make_config(), overrides=["a=1"])
    assert sorted(os.listdir(outcome.folder)) == [
        "config.yaml",
        "record.json",
        "run.log",
        "timeline.json",
    ]
    record = RunRecord.load(outcome.folder)
    assert (record.status, record.overrides) == ("ok", ["a=1"])
    assert record.training["loss_per_step"] == [2.5]
    assert record.memory["peak_live_bytes"] == 2**30
    assert record.provenance["memory"] == "measured"
    assert record.notes[-1] == "from the worker"
    assert record.config["dtype"] == "float32"
    assert record.versions["torch"]
    assert json.loads((outcome.folder / "timeline.json").read_text()) == {"live_bytes": [1, 2, 3]}
    assert (outcome.folder / "run.log").read_text() == "working\n"


@pytest.mark.parametrize(
    ("behaviour", "status", "detail"),
    [
        ("oom", "oom", "oom on purpose"),
        ("error", "error", "error on purpose"),
        ("exit", "error", "exit code 7: working"),
        ("bad_alloc", "oom", "SIGABRT"),
        ("SIGKILL", "killed", "SIGKILL"),
        ("SIGTERM", "killed", "SIGTERM"),
        ("SIGSEGV", "error", "SIGSEGV"),
    ],
)
def test_every_ending_is_a_record_that_keeps_what_was_measured(
    make_config, behaviour, status, detail
):
    record = RunRecord.load(run_job(make_config(behaviour)).folder)
    assert record.status == status
    assert detail in record.status_detail
    assert record.training["loss_per_step"] == [2.5]


def test_a_run_that_takes_too_long_is_killed(make_config):
    record = run_job(make_config("sleep", timeout_s=0.5)).record
    assert record.status == "killed"
    assert "timeout_s=0.5" in record.status_detail


def test_interruption_ends_the_worker_and_leaves_a_record(make_config):
    def interrupt(event):
        if event["event"] == "step":
            raise KeyboardInterrupt

    config = make_config("sleep")
    with pytest.raises(KeyboardInterrupt):
        run_job(config, on_event=interrupt)
    (folder,) = Path(config.runs_dir, "exp").glob("tiny-*")
    assert RunRecord.load(folder).status == "killed"


def test_identical_runs_are_skipped_until_forced(make_config):
    first = run_job(make_config())
    again = run_job(make_config())
    assert (first.skipped, again.skipped) == (False, True)
    assert again.record.run_id == first.record.run_id
    before = (first.folder / "record.json").read_bytes()
    forced = run_job(make_config(force=True))
    assert not forced.skipped
    assert forced.folder.name == first.folder.name + "-2"
    assert (first.folder / "record.json").read_bytes() == before
    changed = run_job(make_config(seed=1))
    assert not changed.skipped


@pytest.mark.parametrize(("behaviour", "skipped"), [("oom", True), ("error", False)])
def test_out_of_memory_is_an_answer_and_an_error_is_not(make_config, behaviour, skipped):
    run_job(make_config(behaviour))
    assert run_job(make_config(behaviour)).skipped is skipped


def test_changed_code_runs_again(make_config, monkeypatch):
    run_job(make_config())
    monkeypatch.setattr(runner.environment, "code_version", lambda: "changed")
    assert not run_job(make_config()).skipped


def test_a_damaged_record_is_left_alone_and_the_run_done_again(make_config):
    first = run_job(make_config())
    (first.folder / "record.json").write_text("{")
    events = []
    again = run_job(make_config(), on_event=events.append)
    assert not again.skipped
    assert again.folder != first.folder
    assert (first.folder / "record.json").read_text() == "{"
    (said,) = (event["text"] for event in events if event["event"] == "warning")
    assert said.startswith(f"skipped {first.folder / 'record.json'}: not a readable record")


@pytest.fixture
def abandoned(make_config, monkeypatch):
    """The folder of a run whose supervisor died."""

    class Death(BaseException):
        pass

    def die(*_, **__):
        raise Death

    with monkeypatch.context() as patch:
        patch.setattr(runner, "supervise", die)
        patch.setattr(runner, "_fill", die)  # nothing is written, as after SIGKILL
        with pytest.raises(Death):
            run_job(make_config())
    (folder,) = Path(make_config().runs_dir, "exp").glob("tiny-*")
    assert not (folder / "record.json").exists()
    for descriptor in os.listdir("/proc/self/fd"):  # a dead process holds no lock
        if os.path.realpath(f"/proc/self/fd/{descriptor}").endswith(f"{folder.name}/.lock"):
            os.close(int(descriptor))
    return folder


def test_the_folder_of_a_dead_process_gets_a_killed_record(make_config, abandoned):
    folder = abandoned
    again = run_job(make_config())
    assert not again.skipped and again.folder != folder
    assert RunRecord.load(folder).status == "killed"
    assert "supervising process ended" in RunRecord.load(folder).status_detail
    assert run_job(make_config()).skipped


def test_another_lone_run_records_the_dead_one_and_says_so(make_config, abandoned):
    alive = folders.claim(abandoned.parent, "alive", "f", force=False)
    shutil.copy(abandoned / ".draft.json", alive.folder)
    run_job(make_config(seed=1))  # one of a sweep, whose start has looked
    assert not (abandoned / "record.json").exists()
    events = []
    run_job(make_config(seed=2), lone=True, on_event=events.append)
    assert RunRecord.load(abandoned).status == "killed"
    assert not (alive.folder / "record.json").exists()
    (said,) = (event["text"] for event in events if event["event"] == "warning")
    assert said.endswith(f"recorded as killed: {abandoned}")
    os.close(alive.lock)


def test_a_folder_of_another_machine_is_left_to_it(make_config, abandoned):
    assert (abandoned / ".lock").read_text() == socket.gethostname()
    (abandoned / ".lock").write_text("another")
    assert folders.close_abandoned(abandoned.parent) == []
    (abandoned / ".lock").write_text(socket.gethostname())
    assert folders.close_abandoned(abandoned.parent) == [abandoned]


def test_a_second_process_waits_for_the_same_run_and_takes_its_record(make_config, monkeypatch):
    monkeypatch.setattr(folders, "_WAIT_S", 0.05)
    first = folders.claim(Path(make_config().runs_dir), "job", "f", force=False)
    waited = []

    def finish():
        time.sleep(0.3)
        RunRecord(
            run_id="first",
            fingerprint="f",
            experiment="e",
            job="job",
            status="ok",
            started_at="",
            finished_at="",
            config={},
        ).write(first.folder)
        first.release()

    thread = threading.Thread(target=finish)
    thread.start()
    second = folders.claim(
        Path(make_config().runs_dir), "job", "f", force=False, on_message=waited.append
    )
    thread.join()
    assert second.run_id == "first"
    assert waited == [f"waiting for the process that runs {first.folder}"]


def test_claims_at_the_same_moment_never_share_a_folder(tmp_path):
    claims = []
    threads = [
        threading.Thread(
            target=lambda: claims.append(folders.claim(tmp_path, "job", "f", force=True))
        )
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({claim.folder for claim in claims}) == 12
    assert len(attempts(tmp_path, "job")) == 12


def test_a_disk_that_fills_up_during_a_run_costs_no_result(make_config, monkeypatch, tmp_path):
    monkeypatch.setattr(runner.tempfile, "gettempdir", lambda: str(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunsFolderError) as error:
        patch.setattr(RunRecord, "write", full)
        run_job(make_config())
    assert "No space left on device" in str(error.value)
    rescued, target = re.search(r"cp (\S+) (\S+) keeps it", str(error.value)).groups()
    assert RunRecord.load(rescued).status == "ok"
    shutil.copy(rescued, target)
    again = run_job(make_config())
    assert again.skipped and str(again.record.path) == target


def test_a_timeline_that_does_not_fit_the_disk_costs_no_record(make_config, monkeypatch):
    write_new = runner.write_new

    def nearly_full(target, text):
        if target.name == "timeline.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_new(target, text)

    monkeypatch.setattr(runner, "write_new", nearly_full)
    record = RunRecord.load(run_job(make_config()).folder)
    assert record.status == "ok"
    assert record.notes[-1] == "the timeline could not be stored: No space left on device"


def test_a_runs_folder_that_cannot_be_written(make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunsFolderError, match=r"runs_dir: cannot write .*Fix: .*runs_dir=<another"):
        run_job(make_config(runs_dir=str(tmp_path / "file")))


def test_options_that_a_method_does_not_take_are_dropped_with_a_note(make_config):
    method = {"name": "standard", "chunk_size": 64, "keep_kv": True}
    config, notes = resolve(make_config(method=method))
    assert config.method == make_config().method
    assert "method.chunk_size=64 has no effect with method=standard" in notes


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({}, False),
        ({"tracking": {"name": "wandb"}}, True),
        ({"tracking": {"name": "wandb"}, "measure": {"timeline": False}}, False),
        ({"tracking": {"name": "wandb"}, "measure": {"memory": False}}, False),
        ({"tracking": {"name": "wandb"}, "search": {"name": "max_seq_len"}}, False),
        ({"measure": {"timeline": True}}, True),
    ],
)
def test_measured_runs_store_a_timeline_for_wandb(make_config, monkeypatch, changes, stored):
    monkeypatch.setattr("streambp.bench.preflight._needs", lambda *_: None)
    for lone in (False, True):
        config, _ = resolve(make_config(**changes), lone=lone)
        assert config.measure.timeline is stored


@pytest.mark.parametrize(
    ("targets", "fix"),
    [
        (["q_proj", "down_proj"], None),
        (r".*\.[qv]_proj", None),
        ("all-linear", None),
        (["q_proj", "v_prj"], r"=\[v_proj\], or all-linear"),
        (["x"], r"=\[down_proj,.*,v_proj\], or all-linear"),
        ("q_proj", r"=\[q_proj\], or all-linear"),  # a pattern of whole names
    ],
)
def test_adapters_go_to_parts_that_the_model_has(make_config, tiny_fields, targets, fix):
    pytest.importorskip("peft")
    tuning = {"name": "lora", "target_modules": targets}
    config = make_config(tuning=tuning, model={"name": "tiny", "config": tiny_fields})
    if fix is None:
        assert resolve(config)[0].tuning == config.tuning
        return
    with pytest.raises(ConfigError, match=rf"target_modules=.*Fix: tuning\.target_modules{fix}"):
        resolve(config)


def test_preflight_refuses_what_this_machine_cannot_do(make_config):
    import torch

    with pytest.raises(ConfigError, match="Fix: method=checkpointing"):
        resolve(make_config(method={"name": "checkpoint"}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cpu"):
            resolve(make_config(device={"name": "cuda"}))
    experiment = ExperimentConfig(kind="benchmark", options={"rounds": 1})
    with pytest.raises(ConfigError, match="see experiment=cpu_benchmark"):
        resolve(make_config().replace(experiment=experiment))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't "
                "allocate memory: you tried to allocate 1 bytes. Error code 12 (Cannot allocate "
                "memory)"
            ),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_real_failed_allocation_counts():
    import torch

    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
