"""A sweep whose workers and supervisor are killed at random moments loses and doubles nothing."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

from streambp.bench.records import iter_records

HERE = Path(__file__).parent
JOBS = 12
KILLS = 30
TIME_LIMIT_S = 240


def start(runs_dir):
    seeds = ",".join(map(str, range(JOBS)))
    settings = ["model=qwen3_tiny", "method=standard", "device=cpu", f"runs_dir={runs_dir}"]
    return subprocess.Popen(
        [
            sys.executable,
            str(HERE / "fake_run.py"),
            "-m",
            *settings,
            f"seed={seeds}",
            "+experiment.options.behaviour=slow",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def running_worker(runs_dir):
    """The pid of the worker whose run has no record yet."""
    for path in runs_dir.rglob("worker.pid"):
        text = path.read_text()
        if text and not (path.parent / "record.json").exists():
            pid = int(text)
            with contextlib.suppress(OSError):
                if b"fake_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
    return None


@pytest.mark.slow
def test_every_job_has_exactly_one_final_record_after_thirty_kills(tmp_path):
    dice = random.Random(0)
    deadline = time.monotonic() + TIME_LIMIT_S
    killed = Counter()
    sweep = start(tmp_path)
    while killed.total() < KILLS:
        assert time.monotonic() < deadline, killed
        if sweep.poll() is not None:  # done before all kills: make work again
            done = [r for r in iter_records(tmp_path) if r.status == "ok"]
            for record in dice.sample(done, len(done) // 2):
                record.path.unlink()
            sweep = start(tmp_path)
        time.sleep(dice.uniform(0, 0.15))
        worker = running_worker(tmp_path)
        if worker is None:
            continue
        if dice.random() < 0.8:  # a supervisor takes seconds to start
            killed["worker"] += kill(worker)
        else:
            killed["supervisor"] += kill(sweep.pid)
            sweep.wait()
            sweep = start(tmp_path)
    sweep.wait(timeout=TIME_LIMIT_S)
    last = start(tmp_path)
    assert last.wait(timeout=TIME_LIMIT_S) == 0
    assert min(killed["worker"], killed["supervisor"]) >= 3, killed

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a corrupt record would be skipped with a warning
        records = list(iter_records(tmp_path))
    finished = Counter(record.config["seed"] for record in records if record.finished)
    assert finished == Counter(range(JOBS))
    assert {record.status for record in records} == {"ok", "killed"}
    assert len({record.run_id for record in records}) == len(records)
    assert not list(tmp_path.rglob(".record.json.*"))
    before = {record.path: record.path.read_bytes() for record in records}
    assert start(tmp_path).wait(timeout=TIME_LIMIT_S) == 0
    assert {r.path: r.path.read_bytes() for r in iter_records(tmp_path)} == before
