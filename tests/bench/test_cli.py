"""run.py as a user meets it: a real process, its output and its exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streambp.bench import cli
from streambp.bench.records import RunRecord, iter_records

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BEHAVIOUR = "+experiment.options.behaviour="


def command(runs_dir, *arguments, fake=True):
    script = HERE / "fake_run.py" if fake else ROOT / "run.py"
    settings = ["model=qwen3_tiny", "device=cpu", f"runs_dir={runs_dir}"]
    return [sys.executable, str(script), *settings, *arguments]


def run(runs_dir, *arguments, fake=True):
    return subprocess.run(
        command(runs_dir, *arguments, fake=fake),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("seqlen=3", "did you mean seq_len?"),
        ("method=streambpp", "did you mean method=streambp?"),
        ("experiment=quickstrt", "did you mean experiment=quickstart?"),
        ("method.chunk_sise=3", "did you mean method.chunk_size?"),
        ("+model.fooo=1", "one of checkpoint, config, hf_config, name"),
        ("gpu.memory_byts=1", "did you mean gpu.memory_bytes?"),
        ("search.stp=8", "did you mean search.step?"),
        ("device.assumptions.msk=none", "did you mean device.assumptions.mask?"),
        ("seq_len=64,128", "several values. Fix: python run.py -m seq_len=64,128"),
        ("seed=range(3)", "several values. Fix: python run.py -m seed=range(3)"),
    ],
)
def test_misspelled_names(argument, said):
    assert said in cli.override_problem([argument])


@pytest.mark.parametrize(
    "argument",
    [
        "seq_len=3",
        "+gpu.prefer_cudnn_attention=false",
        "search.start=8",
        "+experiment.options.x=1",
        "model.config.num_hidden_layers=1",
        "~optimizer",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "-m",
        "optimizer.betas=[0.8,0.9]",
        "experiment.description='a, b'",
    ],
)
def test_right_names(argument):
    assert cli.override_problem([argument]) is None
    assert cli.override_problem(["method=standard,streambp", argument, "-m"]) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seq_len=0"], "Fix: seq_len=1024"),
        (["-m", "seq_len=64,0"], "in job: model=qwen3_tiny"),
        (["method=standard,streambp"], "Fix: python run.py -m model=qwen3_tiny"),
        (["experiment=quickstart"], "python run.py -m"),
        (["device=cuda", "device.index=99"], "device"),
    ],
)
def test_bad_commands_end_early_without_a_traceback(tmp_path, arguments, said):
    done = run(tmp_path, *arguments)
    assert done.returncode == cli.EXIT_USAGE
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["hydra/launcher=jobli"],
        ["-m", "hydra.sweeper.grid=[]"],
        ["model.config.nonsense=3"],
        ["-m", "seq_len=${foo}"],
        ["seq_len=${foo}"],
    ],
)
def test_what_hydra_refuses_is_a_command_that_cannot_work(tmp_path, arguments):
    done = run(tmp_path / "runs", *arguments)
    assert done.returncode == cli.EXIT_USAGE, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_program_is_not_taken_for_one_of_the_command(monkeypatch):
    def broken():
        try:
            raise TypeError("a mistake here")
        except TypeError:
            sys.exit(1)

    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.start(broken)
    assert end.value.code == cli.EXIT_FAILED


def test_a_runs_folder_that_cannot_be_written_ends_a_sweep_at_its_start(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "file", "-m", "seq_len=32,64", "method=standard")
    assert done.returncode == cli.EXIT_USAGE, done.stderr
    assert done.stderr.count("runs_dir: cannot write") == 1
    assert "job 1/2" not in done.stdout


def test_a_sweep_goes_on_after_failures_and_resumes(tmp_path):
    jobs = ["-m", f"{BEHAVIOUR}ok,error,SIGKILL,oom", "method=standard"]
    done = run(tmp_path, *jobs)
    assert done.returncode == cli.EXIT_FAILED, done.stderr
    assert "job 3/4" in done.stdout
    assert "3 not ok:" in done.stdout
    for status, behaviour in (("error", "error"), ("killed", "SIGKILL"), ("oom", "oom")):
        assert f"  {status}: " in done.stdout
        assert f"{BEHAVIOUR}{behaviour}" in done.stdout
    assert done.stdout.count("run.log") >= 6  # once when it happens, once in the list
    statuses = sorted(record.status for record in iter_records(tmp_path))
    assert statuses == ["error", "killed", "ok", "oom"]

    again = run(tmp_path, *jobs)
    assert again.stdout.count("already there") == 2
    statuses = sorted(record.status for record in iter_records(tmp_path))
    assert statuses == ["error", "error", "killed", "killed", "ok", "oom"]


def test_exit_codes_of_a_good_and_a_full_run(tmp_path):
    good = run(tmp_path, "-m", "seq_len=32,64", "method=standard")
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "default" / "memory_time.png").stat().st_size > 1000
    measures = [record.config["measure"] for record in iter_records(tmp_path)]
    assert [measure["timeline"] for measure in measures] == [False, False]  # only lone runs
    full = run(tmp_path, f"{BEHAVIOUR}oom", "method=standard")
    assert full.returncode == cli.EXIT_OOM


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_sweep_ends_its_worker_and_loses_nothing(tmp_path, sent):
    jobs = ["-m", f"{BEHAVIOUR}ok,sleep,error", "method=standard"]
    process = subprocess.Popen(
        command(tmp_path, *jobs), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: list(tmp_path.rglob("worker.pid")))
    (pid_file,) = tmp_path.rglob("worker.pid")
    wait_for(lambda: pid_file.read_text())
    os.kill(process.pid, sent)
    _, errors = process.communicate(timeout=60)
    wait_for(lambda: gone(int(pid_file.read_text())), timeout_s=10)
    if sent == signal.SIGKILL:
        assert not (pid_file.parent / "record.json").exists()
        other = run(tmp_path, "-m", "seq_len=32", "method=standard")
        assert f"recorded as killed: {pid_file.parent}" in other.stdout
    else:
        assert process.returncode == cli.EXIT_INTERRUPTED
        assert "the same command again runs what is missing" in errors
    assert RunRecord.load(pid_file.parent).status == "killed"
    statuses = [record.status for record in iter_records(tmp_path)]
    assert statuses.count("ok") == 1 + (sent == signal.SIGKILL) and "error" not in statuses
