"""One real sweep that several tests look at: making it takes most of their time."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    "experiment=bp_memory_figure",
    "device=cpu",
    "model=qwen3_tiny",
    "seq_len=32",
    "optimizer=adamw",
    "steps=2",
    "measure.timing_samples=1",
    "measure.timeline=true",
)


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended: its folder, its settings beside the methods, its process."""

    runs_dir: Path
    settings: tuple[str, ...]
    done: subprocess.CompletedProcess


@pytest.fixture(scope="session")
def real_sweep(tmp_path_factory):
    """Two methods, measured on this CPU by joblib's two processes. Don't write into its folder."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    runs_dir = tmp_path_factory.mktemp("real_sweep")
    settings = (*SETTINGS, f"runs_dir={runs_dir}")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    command = [sys.executable, str(ROOT / "run.py"), "-m", *settings, *launcher]
    command.append("method=standard,checkpointing")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    return Sweep(runs_dir, settings, done)
