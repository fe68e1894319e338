"""Bytes of what a training step starts from: weights, gradients, optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["fill_gradients", "optimizer_tensors", "state_bytes"]


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of the parameters and buffers, of the gradients that exist, and of optimizer states.

    Storages are counted once, so tied weights are too.
    """
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    return {
        "weights_bytes": _storage_bytes([*model.parameters(), *model.buffers()]),
        "gradients_bytes": _storage_bytes(gradients),
        "optimizer_bytes": _storage_bytes(optimizer_tensors(optimizer)),
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """The tensors an optimizer keeps between its steps."""
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def fill_gradients(model: nn.Module) -> None:
    """Give every trained parameter that has no gradient one of zeros: gradients are resident."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
