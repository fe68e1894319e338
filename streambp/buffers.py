"""Whole-sequence buffers that one layer may hand to the next to be overwritten."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_MARK = "_streambp_buffer"


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor this library allocated and nothing else may hold on to."""
    setattr(tensor, _MARK, True)
    return tensor


def keeps_graph() -> bool:
    """Inside a backward pass: will the graph be used again (`retain_graph=True`)?"""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


def reusable(grad: torch.Tensor) -> bool:
    """May the running backward function overwrite the gradient it was given?

    Only if this library made it, the graph is not kept, and nobody else refers to it or to its
    storage: neither a hook that stored it (detached, as a view or as an array) nor
    `torch.autograd.grad` waiting to return it. Call it with the argument of a
    `once_differentiable` backward: other frames hold more references.
    """
    if not hasattr(grad, _MARK) or not _CAN_COUNT or keeps_graph():
        return False
    return _no_more(_references(grad), _usual_references())


def owned_alone(tensor: torch.Tensor, python_references: int) -> bool:
    """Did this library make `tensor`, and does only the caller's one variable refer to it?

    python_references: `sys.getrefcount(tensor)` as the caller sees it.
    """
    if not hasattr(tensor, _MARK) or not _CAN_COUNT:
        return False
    alone = torch.empty(1)
    usual = _counts(alone, sys.getrefcount(alone))
    return _no_more(_counts(tensor, python_references), usual)


References = tuple[int, int, int]
_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def _references(tensor: torch.Tensor) -> References:
    return _counts(tensor, sys.getrefcount(tensor))


def _counts(tensor: torch.Tensor, python_references: int) -> References:
    """References to the tensor from C++ and from Python, and to its storage."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return (tensor._use_count(), python_references, storage)  # type: ignore[attr-defined]


def _no_more(here: References, usual: References) -> bool:
    return all(found <= expected for found, expected in zip(here, usual, strict=True))


@functools.cache
def _usual_references() -> References:
    """What `_references` finds for a gradient that nobody else refers to."""
    if not _CAN_COUNT:
        return (-1, -1, -1)  # can't tell: never reuse
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        _Probe.apply(_Probe.apply(x)).sum().backward()
    return _Probe.found


class _Probe(torch.autograd.Function):
    """Measures `_references` in a backward pass with nobody watching."""

    found: References = (-1, -1, -1)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Probe.found = _probe_references(grad)
        return grad.clone()


def _probe_references(grad: torch.Tensor) -> References:
    # One frame between the backward function and `_references`, as in `reusable`.
    return _references(grad)
