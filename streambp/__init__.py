"""Exact backpropagation of Hugging Face causal language models, chunk by chunk.

The names are loaded on first use: whoever only reads configs or records never pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streambp.config import StreamConfig
    from streambp.loss import linear_cross_entropy, token_logprobs
    from streambp.model import disable, enable
    from streambp.sim.plan import estimate_max_sequence_length, plan

__all__ = [
    "StreamConfig",
    "disable",
    "enable",
    "estimate_max_sequence_length",
    "linear_cross_entropy",
    "plan",
    "token_logprobs",
]

_MODULES = {
    "StreamConfig": "config",
    "disable": "model",
    "enable": "model",
    "estimate_max_sequence_length": "sim.plan",
    "linear_cross_entropy": "loss",
    "plan": "sim.plan",
    "token_logprobs": "loss",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
