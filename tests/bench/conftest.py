"""Tiny models and batches that the harness tests share."""

import pytest
import torch

from streambp.bench.config import ModelConfig
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
