"""What is simulated: one configured run, reduced to what decides its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streambp.bench.config import ModelConfig, TuningConfig
from streambp.bench.models import hf_config
from streambp.sim.gpus import Gpu
from streambp.sim.settings import Assumptions


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One forward and backward pass on one GPU.

    Args:
        gpu: None simulates the plain CPU: no kernel routing, no rounding, no workspaces.
        method, method_options: a name in the method registry, and its options.
        optimizer, optimizer_state_dtype: whose states are resident: "none", "adamw" (two moments
            of that dtype, None: the parameters' own) or "adamw_8bit".
    """

    model: ModelConfig
    method: str
    seq_len: int
    gpu: Gpu | None
    method_options: Mapping[str, Any] = field(default_factory=dict)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    objective: str = "sft"
    batch_size: int = 1
    dtype: str = "bfloat16"
    optimizer: str = "none"
    optimizer_state_dtype: str | None = None
    assumptions: Assumptions = field(default_factory=Assumptions)

    def replace(self, **changes: Any) -> Workload:
        """A copy with fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Depth:
    """How a model repeats in depth. `period`: layers after which the pattern of kinds repeats."""

    num_layers: int
    period: int

    def short_pair(self) -> tuple[int, int] | None:
        """Two shorter depths with the same ends and pattern, or None if the model has no more.

        Both hold `period` layers at either end and at least one full pattern between.
        """
        shortest = 3 * self.period
        first = shortest + (self.num_layers - shortest) % self.period
        second = first + self.period
        return (first, second) if second < self.num_layers else None


def depth_of(model: ModelConfig) -> Depth:
    """Number of decoder layers of a model, and the period of their kinds."""
    config = hf_config(model)
    num_layers = config.num_hidden_layers
    columns = list(_per_layer_lists(config.to_dict(), num_layers).values())
    for period in range(1, num_layers + 1):
        if all(
            column[i] == column[i + period]
            for column in columns
            for i in range(num_layers - period)
        ):
            return Depth(num_layers, period)
    raise AssertionError("a model repeats at the latest after all its layers")


def with_num_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    """The same model cut to its first `num_layers` decoder layers."""
    config = hf_config(model)
    fields = config.to_dict()
    for name, values in _per_layer_lists(fields, config.num_hidden_layers).items():
        fields[name] = values[:num_layers]
    fields["num_hidden_layers"] = num_layers
    fields.setdefault("model_type", config.model_type)
    return ModelConfig(name=model.name, config=fields)


def _per_layer_lists(fields: Mapping[str, Any], num_layers: int) -> dict[str, list[Any]]:
    """Config entries that hold one value per layer."""
    return {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    }
