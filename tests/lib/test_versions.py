"""The oldest supported transformers and torch, in an environment of its own.

The suite itself runs on the newest. For the oldest, make an environment with it and name it:

    python -m venv oldest
    oldest/bin/pip install "transformers==5.0.*" "torch==2.8.*" pytest hypothesis
    STREAMBP_OLDEST_PYTHON=oldest/bin/python python -m pytest tests/lib/test_versions.py
"""

import os
import pathlib
import subprocess

import pytest

VARIABLE = "STREAMBP_OLDEST_PYTHON"
FOLDER = pathlib.Path(__file__).parent
CORE = (
    "test_every_family or test_keep_options or test_tied or test_packed or test_explicit "
    "or test_input_embeddings or test_named or test_frozen or test_head_groups "
    "or test_loss_value or generate or cache or checkpointing or deep_copy or refused or hooks "
    "or shapes or fake_tensors"
)


def test_the_oldest_transformers():
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter with transformers 5.0")
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    version = _run(python, ["-c", "import transformers; print(transformers.__version__)"])
    assert version.stdout.startswith("5.0."), version.stdout + version.stderr
    names = ("test_exactness.py", "test_contracts.py", "test_autograd.py", "test_cuda_shapes.py")
    files = [str(FOLDER / name) for name in names]
    result = _run(
        python, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CORE, *files], environment
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]


def _run(python, arguments, environment=None):
    return subprocess.run(
        [python, *arguments],
        cwd=FOLDER.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
