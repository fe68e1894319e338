"""Names for the tensors the library allocates, so that a memory tracker can say what they are.

The algorithm never imports a tracker: it calls `label`, which does nothing
unless somebody observes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

CATEGORIES = (
    "saved_inputs",  # layer inputs kept from forward to backward, (B, T, D) each
    "saved_attention",  # attention outputs and log-sum-exps kept by `keep_attention`
    "kv",  # keys and values of one layer (of every layer with `keep_kv`)
    "kv_grads",  # running gradients of one layer's keys and values
    "weight_grad_buffers",  # one layer's (or the head's) weight gradients while they accumulate
    "hidden_grads",  # gradient of the hidden states on its way down
    "logits",  # one head chunk's logits
)

Observer = Callable[[torch.Tensor, str], None]
_observers: list[Observer] = []


@contextmanager
def observe(callback: Observer) -> Iterator[None]:
    """Call `callback(tensor, category)` for every tensor the library labels inside the block."""
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


def label(tensor: torch.Tensor, category: str) -> torch.Tensor:
    """Tell the observers that `tensor` belongs to `category`; returns the tensor unchanged."""
    for callback in _observers:
        callback(tensor, category)
    return tensor
