"""Small workloads that the simulation's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streambp.bench.config import ModelConfig
from streambp.sim.gpus import gpu_named
from streambp.sim.settings import Assumptions
from streambp.sim.tracker import Block, Event
from streambp.sim.workload import Workload


def small_model(num_layers: int = 5, **fields: Any) -> ModelConfig:
    """A Qwen3 of `num_layers` with odd sizes."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 997,
        "hidden_size": 64,
        "intermediate_size": 208,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return ModelConfig(name="small", config={**config, **fields})


def small_workload(method: str = "standard", **changes: Any) -> Workload:
    """A pass of the small model on an A800; `assumptions` may be a dict of what differs."""
    assumptions = Assumptions.from_mapping(changes.pop("assumptions", None))
    values: dict[str, Any] = {
        "model": small_model(),
        "method": method,
        "seq_len": 150,
        "gpu": gpu_named("a800_80gb"),
        "assumptions": assumptions,
    }
    return Workload(**{**values, **changes})


def told_apart(blocks: Sequence[Block]) -> list[tuple[str, Event]]:
    """Every event with its phase, ids numbered by their first occurrence."""
    ids: dict[int, int] = {}
    return [
        (block.phase, event._replace(event_id=ids.setdefault(event.event_id, len(ids))))
        for block in blocks
        for event in block.events
    ]
