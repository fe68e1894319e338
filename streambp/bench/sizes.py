"""Sizes in a model's configuration that no model can have, found without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streambp.bench.errors import ConfigError

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Architectures whose heads share out the hidden size where no head_dim is given.
_SHARING = ("llama", "mistral", "qwen2", "phi", "phi3", "olmo", "olmo2", "gpt_neox")


def check_sizes(config: Mapping[str, Any], prefix: str = "model.config.") -> None:
    """Raise ConfigError for sizes that are not positive and head counts that do not divide.

    config: keys of HF's config.json; a missing one, or None, is left to the architecture.
    prefix: of a key's name in messages.
    """
    for key in _POSITIVE:
        value = config.get(key)
        if value is None:
            continue
        fix = f"{prefix}{key}=<whole number above 0>"
        if isinstance(value, bool) or not isinstance(value, int):
            problem = f"must be a whole number, not {type(value).__name__}"
            raise ConfigError(f"{prefix}{key}", value, problem, fix)
        if value < 1:
            raise ConfigError(f"{prefix}{key}", value, "must be at least 1", fix)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and groups and heads % groups:
        problem = f"does not divide num_attention_heads={heads}"
        fix = f"{prefix}num_key_value_heads=<divisor of {heads}>"
        raise ConfigError(f"{prefix}num_key_value_heads", groups, problem, fix)
    hidden = config.get("hidden_size")
    shares = config.get("model_type") in _SHARING and config.get("head_dim") is None
    if shares and heads and hidden and hidden % heads:
        problem = f"is no multiple of num_attention_heads={heads}"
        fix = f"{prefix}hidden_size={hidden - hidden % heads or heads}, or give {prefix}head_dim"
        raise ConfigError(f"{prefix}hidden_size", hidden, problem, fix)
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        check_sizes(inner, f"{prefix}text_config.")
