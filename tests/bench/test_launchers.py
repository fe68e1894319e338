"""Sweeps by Hydra's launchers: the same records and locks, whoever starts the processes."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from streambp.bench import cli, folders
from streambp.bench.records import RunRecord, iter_records
from streambp.bench.sweep import _after_the_launcher

ROOT = Path(__file__).resolve().parents[2]


def sweep(settings, *overrides, **options):
    command = [sys.executable, str(ROOT / "run.py"), "-m", *settings, *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def test_joblib_runs_jobs_in_parallel_processes(real_sweep):
    done = real_sweep.done
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = iter_records(real_sweep.runs_dir)
    assert first.training["loss_per_step"] == pytest.approx(second.training["loss_per_step"])
    assert "difference of the methods' losses" in done.stdout


def test_submitit_takes_what_is_there_and_runs_the_rest(real_sweep, tmp_path):
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    runs_dir = tmp_path / "runs"
    shutil.copytree(real_sweep.runs_dir, runs_dir)
    (old,) = (r for r in iter_records(runs_dir) if r.config["method"]["name"] == "standard")
    before = old.path.read_bytes()
    settings = [*real_sweep.settings, f"runs_dir={runs_dir}", "method=standard,streambp"]
    done = sweep(settings, "hydra/launcher=slurm_local", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert old.path.read_bytes() == before
    records = list(iter_records(runs_dir))
    methods = sorted(record.config["method"]["name"] for record in records)
    assert methods == ["checkpointing", "standard", "streambp"]
    assert {record.status for record in records} == {"ok"}
    outputs = "".join(path.read_text() for path in (runs_dir / ".submitit").rglob("*.out"))
    assert f"already there: {old.path}" in outputs
    assert {path.parent.name for path in runs_dir.rglob(".lock")} == {"bp_memory_figure"}
    assert list(tmp_path.iterdir()) == [runs_dir]  # submitit's own files are below it


@pytest.fixture
def broken_slurm(tmp_path):
    """A PATH whose sbatch keeps what it is given and fails."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "sacct"):
        file = tmp_path / "bin" / name
        file.write_text(
            f'#!/bin/sh\ncp "$1" {tmp_path}/{name}.txt\necho no such queue >&2\nexit 1\n'
        )
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def test_slurm_gets_its_settings_and_its_failure_is_said(broken_slurm):
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    settings = ["model=qwen3_tiny", "device=cuda", f"runs_dir={broken_slurm / 'runs'}"]
    done = sweep(
        settings,
        "seed=0,1",
        "hydra/launcher=slurm",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.timeout_min=90",
        env={"PATH": f"{broken_slurm / 'bin'}:/usr/bin:/bin"},
    )
    # device=cuda is right where the job runs, whatever is here.
    assert "is visible to torch" not in done.stderr and "without CUDA" not in done.stderr
    assert done.returncode == cli.EXIT_FAILED
    assert "the launcher failed" in done.stderr and "no such queue" in done.stderr
    assert "2 not ok:" in done.stdout
    assert done.stdout.count("no record: it still runs, or never started") == 2
    script = (broken_slurm / "sbatch.txt").read_text()
    for line in ("partition=gpu", "gpus-per-node=1", "cpus-per-task=4", "time=90", "array=0-1%2"):
        assert f"#SBATCH --{line}" in script, script


def test_after_a_lost_launcher_every_job_has_its_newest_record_or_a_reason(tmp_path):
    def record(job, seconds, status):
        return RunRecord(
            run_id=f"{job}{seconds}",
            fingerprint="f",
            experiment="e",
            job=job,
            status=status,
            started_at="",
            finished_at=f"2030-01-01T00:00:0{seconds}+00:00",
            config={},
            overrides=[f"job={job}"],
        )

    for name, values in (("a", ("a", 2, "ok")), ("a-2", ("a", 1, "error"))):
        (tmp_path / name).mkdir()
        record(*values).write(tmp_path / name)
    dead = folders.claim(tmp_path, "b", "f", force=False)
    dead.store_draft(record("b", 3, "killed"))
    os.close(dead.lock)  # what the end of its process does
    found = _after_the_launcher([["job=a"], ["job=b"], ["job=c"]], [tmp_path] * 3)
    assert [getattr(record, "status", "none") for record in found] == ["ok", "killed", "none"]
    assert "no record: it still runs, or never started" in found[2]


def test_a_launcher_that_is_not_installed_says_what_to_install(monkeypatch):
    def missing(package):
        raise cli.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(cli.metadata, "version", missing)
    for name, extra in (("slurm", "slurm"), ("submitit_local", "slurm"), ("joblib", "joblib")):
        assert f"pip install -e '.[{extra}]'" in cli.override_problem([f"hydra/launcher={name}"])
    assert cli.override_problem(["hydra/launcher=basic"]) is None
