"""Tiny models and batches that the harness tests share, and runs of the fake worker."""

from pathlib import Path

import pytest
import torch

from streambp.bench import supervise
from streambp.bench.config import ModelConfig, RunConfig
from streambp.bench.models import build


@pytest.fixture
def tiny_fields():
    """Fields of a two-layer Qwen3 that a CPU runs in milliseconds."""
    return {
        "model_type": "qwen3",
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }


@pytest.fixture
def tiny_cfg(tiny_fields):
    return ModelConfig(name="tiny", config=tiny_fields)


@pytest.fixture
def tiny_model(tiny_cfg):
    return build(tiny_cfg, dtype="float32", device="cpu", seed=0)


@pytest.fixture
def tiny_batch():
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, 260, (2, 24), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


@pytest.fixture
def fake_worker(monkeypatch):
    """Runs of `run_job` in this test do at once what `make_config(behaviour)` says."""
    monkeypatch.setattr(supervise, "WORKER", (str(Path(__file__).with_name("fake_worker.py")),))


@pytest.fixture
def make_config(tmp_path):
    """(behaviour of the fake worker, changes) -> the config of a run below `tmp_path`."""

    def make(behaviour="ok", **changes):
        values = {
            "model": {"name": "tiny", "config": {"model_type": "qwen3"}},
            "method": {"name": "standard"},
            "device": {"name": "cpu"},
            "runs_dir": str(tmp_path / "runs"),
            "experiment": {"name": "exp", "options": {"behaviour": behaviour}},
        }
        return RunConfig.from_dict({**values, **changes})

    return make
