"""Attention kernels over one block of keys, with log-sum-exp, forward and backward.

B batch, H query heads, K key/value heads, C queries, N keys, E head dim.

A chunk attends to several blocks of keys. Each kernel here answers for one block: the softmax over
that block alone and its log-sum-exp, so that blocks can be merged, and the block's gradients given
the *merged* output and log-sum-exp (as ring attention does, arXiv 2310.01889). Query and key heads
are equal in number (`attention.py` folds grouped heads away).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

aten = torch.ops.aten

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What turns query-key products into attention weights, apart from the mask.

    scale: factor on the products. softcap: `cap * tanh(score / cap)` where given. dropout: chance
    that a weight is dropped; seed: of the dropped weights, the same in forward and backward.
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0

    @property
    def plain(self) -> bool:
        """True where a fused kernel computes exactly this."""
        return self.softcap is None and self.dropout == 0.0


class Kernel(ABC):
    """One block of attention. `bias` is additive, (B or 1, 1 or H, C, N), or `None`."""

    name: str

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, C, E) and natural-log log-sum-exp (B, H, C) of this block alone.

        `causal` needs as many queries as keys.
        """

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v through this block, from the merged `out` and `lse`."""


class CpuFlash(Kernel):
    """PyTorch's blocked CPU kernel: float64, float32, bf16 and fp16, any head dim."""

    name = "cpu_flash"

    def forward(self, q, k, v, bias, causal, scoring):  # type: ignore[no-untyped-def]
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scoring.scale
        )
        return out, lse

    def backward(self, grad, q, k, v, out, lse, bias, causal, scoring):  # type: ignore[no-untyped-def]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scoring.scale
        )


class CudaFlash(Kernel):
    """FlashAttention-2 in PyTorch: 16-bit, sm80 and newer, no bias, E a multiple of 8 up to 256.

    It takes grouped heads as they are and aligns `causal` bottom-right where lengths differ.
    """

    name = "cuda_flash"

    def forward(self, q, k, v, bias, causal, scoring):  # type: ignore[no-untyped-def]
        assert bias is None
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scoring.scale
        )
        return out, lse

    def backward(self, grad, q, k, v, out, lse, bias, causal, scoring):  # type: ignore[no-untyped-def]
        assert bias is None
        # Without dropout the kernel never reads the random state, only its presence counts.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2],
            0.0, causal, unused, unused, scale=scoring.scale,
        )  # fmt: skip


class CudaEfficient(Kernel):
    """The memory-efficient CUDA kernel: 16-bit and float32, with or without bias."""

    name = "cuda_efficient"
    _ALIGN = 8  # elements: a row of the bias starts on a 16-byte boundary
    _LSE_ALIGN = 32

    def forward(self, q, k, v, bias, causal, scoring):  # type: ignore[no-untyped-def]
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, self._bias(bias, q, k), True, 0.0, causal, scale=scoring.scale
        )
        return out, lse[:, :, : q.shape[2]]

    def backward(self, grad, q, k, v, out, lse, bias, causal, scoring):  # type: ignore[no-untyped-def]
        # Rows past the last query are padding to the kernel: infinity makes their weights zero.
        padding = -lse.shape[2] % self._LSE_ALIGN
        lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf)
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, self._bias(bias, q, k), out, lse, unused, unused,
            0.0, [True, True, True, False], causal, scale=scoring.scale,
        )  # fmt: skip
        return dq, dk, dv

    def _bias(self, bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        if bias is None:
            return None
        length = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, -length % self._ALIGN))[..., :length]
        return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


class Math(Kernel):
    """Plain matrix products: any device and dtype, soft-caps, dropout. O(C * N) scores."""

    name = "math"

    def forward(self, q, k, v, bias, causal, scoring):  # type: ignore[no-untyped-def]
        scores, _ = self._scores(q, k, bias, causal, scoring)
        lse = torch.logsumexp(scores, -1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        keep = self._keep(weights, scoring)
        if keep is not None:
            weights *= keep
        return (weights @ v.to(weights.dtype)).to(q.dtype), lse

    def backward(self, grad, q, k, v, out, lse, bias, causal, scoring):  # type: ignore[no-untyped-def]
        scores, slope = self._scores(q, k, bias, causal, scoring)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        wide = weights.dtype
        grad = grad.to(wide)
        keep = self._keep(weights, scoring)
        kept = weights if keep is None else weights * keep
        dv = kept.transpose(-1, -2) @ grad
        dweights = grad @ v.to(wide).transpose(-1, -2)
        if keep is not None:
            dweights *= keep
        dscores = dweights.sub_((grad * out.to(wide)).sum(-1, keepdim=True)).mul_(weights)
        if slope is not None:
            dscores *= slope
        dscores *= scoring.scale
        dq, dk = dscores @ k.to(wide), dscores.transpose(-1, -2) @ q.to(wide)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(
        q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (B, H, C, N) in at least fp32 and, with a soft-cap, their slope."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) * scoring.scale) @ k.to(wide).transpose(-1, -2)
        slope = None
        if scoring.softcap is not None:
            capped = torch.tanh(scores / scoring.softcap)
            scores, slope = capped * scoring.softcap, 1 - capped * capped
        if bias is not None:
            scores = scores + bias
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, torch.finfo(wide).min / 2)
        return scores, slope

    @staticmethod
    def _keep(weights: Tensor, scoring: Scoring) -> Tensor | None:
        """Dropout's factors, 0 or 1/(1-p), drawn again from the same seed."""
        if scoring.dropout == 0.0:
            return None
        generator = torch.Generator(weights.device).manual_seed(scoring.seed)
        keep = torch.empty_like(weights).bernoulli_(1 - scoring.dropout, generator=generator)
        return keep.div_(1 - scoring.dropout) if scoring.dropout < 1 else keep


CPU_FLASH, CUDA_FLASH, CUDA_EFFICIENT, MATH = CpuFlash(), CudaFlash(), CudaEfficient(), Math()

_HALF = (torch.bfloat16, torch.float16)
_routed_device: list[str] = []


@contextmanager
def use_device(device_type: str) -> Iterator[None]:
    """Choose kernels as `device_type` would, whatever device the tensors are on (simulation)."""
    _routed_device.append(device_type)
    try:
        yield
    finally:
        _routed_device.pop()


def device_type_of(tensor: Tensor) -> str:
    """The device type kernels are chosen for: the tensor's, unless `use_device` is active."""
    return _routed_device[-1] if _routed_device else tensor.device.type


def select(q: Tensor, v: Tensor, *, biased: bool, scoring: Scoring) -> Kernel:
    """The fastest kernel that computes exactly this block.

    q: (B, H, C, E), v: (B, K, N, E'). `biased`: the block has a mask.
    """
    same_dim = q.shape[-1] == v.shape[-1]
    device_type = device_type_of(q)
    if not scoring.plain or not same_dim:
        return MATH
    if device_type == "cpu":
        return CPU_FLASH
    if device_type == "cuda" and q.shape[-1] % 8 == 0:
        half = q.dtype in _HALF
        if half and not biased and q.shape[-1] <= 256 and _has_flash(q):
            return CUDA_FLASH
        if half or q.dtype == torch.float32:
            return CUDA_EFFICIENT
    return MATH


def _has_flash(tensor: Tensor) -> bool:
    if tensor.device.type != "cuda":  # simulated
        return True
    return torch.cuda.get_device_capability(tensor.device) >= (8, 0)
