"""Sends attention to the kernel CUDA would pick, while the tensors are fake and on the CPU.

Shapes: B batch, M query length, N key length, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from streambp.sim.errors import SimulationError
from streambp.sim.gpus import Gpu
from streambp.sim.tracker import Workspace

aten = torch.ops.aten
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def cuda_attention(gpu: Gpu) -> Iterator[None]:
    """Within it, `F.scaled_dot_product_attention` runs the op that `gpu` would run.

    Equivalent: `F.scaled_dot_product_attention(q, k, v, ...)` on that GPU, with the memory layout
    of its output, its saved tensors and the mask copies it makes. PyTorch's order: cuDNN (where
    preferred), flash (no mask), memory-efficient.

    The function is replaced by name: a torch function mode would be off inside `backward()`, where
    checkpoints run their forward again. A caller that imported the function itself ends in a CPU
    kernel, which `UNROUTED` refuses.

    Raises:
        SimulationError: a call that would end in the math fallback, whose memory is not modelled.
    """
    routed = functools.partial(_attention, gpu)
    with mock.patch.object(F, "scaled_dot_product_attention", routed):
        yield


def _attention(
    gpu: Gpu,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """(B, H, M, E), (B, K, N, E) twice -> (B, H, M, E)."""
    bias = _additive(attn_mask, query)
    kernel = _kernel(gpu, query, key, value, has_mask=bias is not None)
    if kernel == "cudnn":
        bias = None if bias is None else _expanded(bias, query, key)
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
    if kernel == "flash":
        padding = -query.shape[-1] % 8
        if padding:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out[..., : out.shape[-1] - padding] if padding else out
    if bias is not None:
        bias = _expanded(_aligned(bias), query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


def _kernel(
    gpu: Gpu, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, has_mask: bool
) -> str:
    head_dim = query.shape[-1]
    sixteen_bit = query.dtype in _SIXTEEN_BIT
    same_dim = value.shape[-1] == head_dim
    cudnn_fits = sixteen_bit and same_dim and head_dim <= 128 and head_dim % 8 == 0
    if gpu.cudnn_attention_first and cudnn_fits:
        return "cudnn"
    wide_on_small_sm = gpu.sm in (86, 89, 120, 121) and 192 < head_dim <= 224
    if sixteen_bit and same_dim and head_dim <= 256 and not has_mask and not wide_on_small_sm:
        return "flash"
    grouped = key.shape[1] != query.shape[1]
    efficient_dtype = query.dtype in (*_SIXTEEN_BIT, torch.float32)
    alignment = 8 if sixteen_bit else 4
    if efficient_dtype and not grouped and head_dim % alignment == 0:
        return "efficient"
    raise SimulationError(
        f"attention of {query.dtype} with {query.shape[1]} query and {key.shape[1]} key heads of "
        f"{head_dim}{', masked,' if has_mask else ''} would run PyTorch's math fallback on "
        f"{gpu.name}, which is not modelled. Fix: dtype=bfloat16"
    )


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask becomes a new tensor of the query's dtype, as PyTorch makes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, float("-inf"))


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The memory-efficient kernel wants rows that start at multiples of 8: else a padded copy."""
    if all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    num_keys = bias.shape[-1]
    return F.pad(bias, (0, 8 - num_keys % 8))[..., :num_keys]


def _expanded(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _unrouted(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    raise SimulationError(
        "attention ran a CPU kernel in a simulation of a GPU: it was not called as "
        "torch.nn.functional.scaled_dot_product_attention. Fix: attn_implementation=sdpa"
    )


#: Ops that no CUDA run contains, as workspaces that refuse.
UNROUTED: dict[Any, Workspace] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _unrouted,
}
