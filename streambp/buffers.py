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

    Only if this library made it, the graph is not kept, and nobody else refers to it: neither a
    hook that stored it nor `torch.autograd.grad` waiting to return it. Call it with the argument
    of a `once_differentiable` backward: other frames hold more references.
    """
    if not hasattr(grad, _MARK) or keeps_graph():
        return False
    here, usual = _references(grad), _usual_references()
    return here[0] <= usual[0] and here[1] <= usual[1]


def owned_alone(tensor: torch.Tensor, python_references: int) -> bool:
    """Did this library make `tensor`, and does only the caller's one variable refer to it?

    python_references: `sys.getrefcount(tensor)` as the caller sees it.
    """
    alone = torch.empty(0)
    if not hasattr(tensor, _MARK) or not hasattr(tensor, "_use_count"):
        return False
    return python_references <= sys.getrefcount(alone) and tensor._use_count() <= 1


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """References to the tensor: from C++ and from Python."""
    return (tensor._use_count(), sys.getrefcount(tensor))  # type: ignore[attr-defined]


@functools.cache
def _usual_references() -> tuple[int, int]:
    """What `_references` finds for a gradient that nobody else refers to."""
    if not hasattr(torch.Tensor, "_use_count"):
        return (-1, -1)  # can't tell: never reuse
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        _Probe.apply(_Probe.apply(x)).sum().backward()
    return _Probe.found


class _Probe(torch.autograd.Function):
    """Measures `_references` in a backward pass with nobody watching."""

    found = (-1, -1)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Probe.found = _probe_references(grad)
        return grad.clone()


def _probe_references(grad: torch.Tensor) -> tuple[int, int]:
    # One frame between the backward function and `_references`, as in `reusable`.
    return _references(grad)
