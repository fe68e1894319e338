"""Losses and log-probabilities over streamed logits.

B batch, T sequence, D hidden, V vocabulary, N = B * T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streambp.blocked_head import BlockedCrossEntropy, BlockedHeadCall
from streambp.config import DEFAULT_HEAD_CHUNK_SIZE
from streambp.head import HeadCall, StreamedCrossEntropy, StreamedLogProbs

Tensor = torch.Tensor


def token_logprobs(
    hidden: Tensor,
    head: Tensor | torch.nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probability of each label given its token's hidden state, without N x V logits.

    Equivalent to `log_softmax(head(hidden) / temperature).gather(-1, labels)` in fp32.

    hidden: (B, T, D) or (N, D), after the final norm. head: weight (V, D) or a module that maps
    hidden states to logits. labels: hidden's shape without D, int64; not shifted here. bias: (V,),
    only with a weight. softcap: `softcap * tanh(logits / softcap)` before the temperature.
    Returns the shape of labels, fp32 (fp64 for fp64 inputs), 0 where the label is `ignore_index`.

    Differentiable in hidden and head; logits are recomputed in the backward pass. Memory O(N D)
    plus `chunk_size` tokens' logits. SFT, DPO, GRPO and PPO losses are functions of the result.
    Raises `ValueError` for shapes that don't fit, temperature <= 0 or chunk_size < 1.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature!r}: use a number above 0.")
    call = _call(hidden, head, labels, bias, softcap, chunk_size, ignore_index)
    call.temperature = temperature
    log_probs = StreamedLogProbs.apply(call, hidden, *call.parameters())
    return log_probs.view(labels.shape)


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor | torch.nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    num_items: int | Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy of `head(hidden)` against labels, without N x V logits.

    Equivalent to `F.cross_entropy(head(hidden).float(), labels, reduction=reduction)`, or the sum
    divided by `num_items` where given. Arguments as in `token_logprobs`; labels are not shifted.

    Where every label is `ignore_index` the mean is 0 with zero gradients (plain PyTorch: NaN).
    Gradients are formed in the forward pass (`StreamedCrossEntropy`), except for fp16, where
    a later loss scale must reach the logits' gradients before they are rounded.
    Raises `ValueError` for shapes that don't fit, an unknown reduction or chunk_size < 1.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: use 'mean' or 'sum'.")
    call = _call(hidden, head, labels, bias, softcap, chunk_size, ignore_index)
    if reduction == "sum" and num_items is None:
        num_items = 1
    return cross_entropy(call, hidden, num_items)


def cross_entropy(
    call: HeadCall,
    hidden: Tensor,
    num_items: int | Tensor | None,
    blocked: BlockedHeadCall | None = None,
) -> Tensor:
    """Sum of -log p over the labels that count, divided by `num_items` (`None`: their number).

    blocked: the same head, to be differentiated by vocabulary blocks (not under autocast).

    Where no label counts the divisor is at least 1, so the loss is 0 and not 0 / 0.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    counted = (call.labels != call.ignore_index).sum()
    divisor = torch.as_tensor(counted if num_items is None else num_items, device=hidden.device)
    divisor = divisor.to(wide).clamp(min=(counted == 0).to(wide))
    if blocked is not None and not torch.is_autocast_enabled(hidden.device.type):
        return BlockedCrossEntropy.apply(
            blocked, divisor, hidden, blocked.weight, *blocked.norm_parameters()
        )
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or call.parameters())
    if _is_fp16(hidden) or not needs_grad:
        return -StreamedLogProbs.apply(call, hidden, *call.parameters()).sum() / divisor
    return StreamedCrossEntropy.apply(call, divisor, hidden, *call.parameters())


def _is_fp16(hidden: Tensor) -> bool:
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type) == torch.float16
    return hidden.dtype == torch.float16


class _TensorHead(torch.nn.Module):
    """A head given as tensors, which may be the result of other operations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        tensors: Any = {"weight": weight, "bias": bias}
        self._parameters.update(tensors)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        return torch.nn.functional.linear(x, weight, bias)


def softcapped(softcap: float | None, program: Callable[[Tensor], Tensor]) -> Callable:
    """`program` followed by `softcap * tanh(logits / softcap)`, or as it is."""
    if softcap is None:
        return program
    return lambda rows: torch.tanh(program(rows) / softcap) * softcap


def _call(
    hidden: Tensor,
    head: Tensor | torch.nn.Module,
    labels: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk_size: int | None,
    ignore_index: int,
) -> HeadCall:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} don't fit hidden of shape "
            f"{tuple(hidden.shape)}: one label per token."
        )
    if isinstance(head, torch.nn.Module):
        if bias is not None:
            raise ValueError("bias goes with a head given as a weight; a module has its own.")
        module = head
    else:
        if head.ndim != 2 or head.shape[1] != hidden.shape[-1]:
            raise ValueError(
                f"head of shape {tuple(head.shape)}: its weight must be (V, {hidden.shape[-1]})."
            )
        module = _TensorHead(head, bias)
    return HeadCall(
        program=softcapped(softcap, module.forward),
        modules=[module],
        labels=labels.flatten(),
        chunk_size=DEFAULT_HEAD_CHUNK_SIZE if chunk_size is None else chunk_size,
        ignore_index=ignore_index,
    )
