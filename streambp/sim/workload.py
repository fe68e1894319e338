"""What is simulated: one configured run, reduced to what decides its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streambp.bench.config import ModelConfig, TuningConfig
from streambp.bench.models import hf_config
from streambp.sim.gpus import Gpu
from streambp.sim.layers import Layer, layers_of
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


def depth_of(model: ModelConfig, tuning: TuningConfig | None = None) -> Depth:
    """Number of decoder layers of a model, and the period of their kinds.

    Two layers are of a kind if the full model builds them alike and the configuration's lists by
    layer say the same of both. Where the model cut short doesn't begin with the same layers, the
    whole depth is the period: nothing is told from shorter ones.
    """
    tuning = tuning or TuningConfig()
    config = hf_config(model)
    num_layers = config.num_hidden_layers
    layers = layers_of(model, tuning)
    if len(layers) != num_layers:
        return Depth(num_layers, num_layers)
    columns: list[Sequence[Any]] = [layers]
    columns += _per_layer_lists(config.to_dict(), num_layers).values()
    period = next(
        period
        for period in range(1, num_layers + 1)
        if all(
            column[i] == column[i + period]
            for column in columns
            for i in range(num_layers - period)
        )
    )
    depth = Depth(num_layers, period)
    alike = all(
        _cut_layers(model, tuning, short) == layers[:short] for short in depth.short_pair() or ()
    )
    return depth if alike else Depth(num_layers, num_layers)


def _cut_layers(model: ModelConfig, tuning: TuningConfig, num_layers: int) -> list[Layer] | None:
    """The layers of the model cut short; None if its configuration allows no such model."""
    try:
        return layers_of(with_num_layers(model, num_layers), tuning)
    except ValueError:
        return None


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
