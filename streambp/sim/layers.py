"""What each decoder layer of a model is made of: two layers that say the same do the same."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from streambp.bench.config import ModelConfig, TuningConfig
from streambp.bench.models import build, hf_config
from streambp.sim.phases import decoder_layers

#: What is compared: (path of a module, parameter or attribute, what it is).
Layer = frozenset[tuple[str, Any]]

_PLAIN = (bool, int, float, str, type(None))
_CACHE: dict[str, list[Layer]] = {}
_CACHE_SIZE = 64


def layers_of(model: ModelConfig, tuning: TuningConfig) -> list[Layer]:
    """What the layers of the model, built without storage, are made of, first to last.

    Modules by class; parameters and buffers by shape, dtype, whether they train and whether an
    earlier layer owns them; plain attributes of modules by value, except a layer's own number.

    Raises:
        ValueError: see `build` and `decoder_layers`.
    """
    config = hf_config(model)
    fields = json.dumps(config.to_dict(), sort_keys=True, default=str)
    key = f"{config.model_type} {fields} {tuning}"
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        built = build(model, dtype="bfloat16", device="meta", seed=0, tuning=tuning)
        _CACHE[key] = _described(decoder_layers(built))
    return _CACHE[key]


def _described(layers: nn.ModuleList) -> list[Layer]:
    seen: set[int] = set()
    found = []
    for layer in layers:
        found.append(_parts(layer, seen))
        seen.update(id(tensor) for tensor in layer.parameters())
    numbers = {
        path
        for path in found[0]
        if all(parts.get(path) is not None for parts in found)
        and all(type(parts[path]) is int and parts[path] == i for i, parts in enumerate(found))
    }
    return [
        frozenset((path, part) for path, part in parts.items() if path not in numbers)
        for parts in found
    ]


def _parts(layer: nn.Module, seen: set[int]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for path, module in layer.named_modules():
        parts[f"{path}:"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                parts[f"{path}:{name}"] = value
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype)
        parts[name] = (shape, dtype, tensor.requires_grad, id(tensor) in seen)
    return parts
