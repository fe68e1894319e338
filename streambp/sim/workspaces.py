"""Device memory that ops use without a tensor to show for it, from public kernel sources.

Shapes: B batch, M query length, N key length, H query heads, K key/value heads, E head dim.
The formulas are read from source, not measured on a device.
"""

from __future__ import annotations

from typing import Any

import torch

from streambp.sim.tracker import Workspace

aten = torch.ops.aten
_MIB = 2**20


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """fp32 accumulator of dq, the row sums of dO * O, and dk, dv of every query head if K < H."""
    query, key = args[1], args[2]
    batch, heads, m, head_dim = query.shape
    rounded_dim = _up(head_dim, 32) if head_dim <= 192 else 256
    num_bytes = batch * heads * _up(m, 128) * (rounded_dim + 1) * 4
    if key.shape[1] != heads:
        num_bytes += 2 * batch * heads * key.shape[2] * head_dim * query.element_size()
    return num_bytes


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """fp32 accumulators of dq (16-bit inputs), of dk and dv when they outgrow the registers."""
    query, key = args[1], args[2]
    batch, heads, m, head_dim = query.shape
    num_bytes = batch * heads * _up(m, 128) * head_dim * 4 if query.element_size() < 4 else 0
    if head_dim > 128:
        num_bytes += 2 * batch * heads * _up(key.shape[2], 128) * head_dim * 4
    return num_bytes


def _cudnn_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """fp32 accumulator of dq and the row sums of dO * O; dk, dv of every query head if K < H."""
    query, key = args[1], args[2]
    batch, heads, m, head_dim = query.shape
    num_bytes = batch * heads * _up(m, 128) * (head_dim + 1) * 4
    if key.shape[1] != heads:
        num_bytes += 2 * batch * heads * key.shape[2] * head_dim * query.element_size()
    return num_bytes


ATTENTION_WORKSPACES: dict[Any, Workspace] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}


def cublas_workspace_bytes(sm: int) -> list[int]:
    """The workspaces cuBLAS and cuBLASLt hold from the first matmul on, one per library.

    32 MiB each on sm90 and newer; 8,519,680 B each before.
    """
    each = 32 * _MIB if sm >= 90 else 8_519_680
    return [each, each]
