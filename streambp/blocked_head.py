"""Cross-entropy that forms the head's gradient in the backward pass, by vocabulary blocks.

N tokens, C tokens of a tile, D hidden, V vocabulary, U vocabulary entries of a block.

The fused loss of `head.py` holds the head's whole weight gradient in fp32 while it sums over
chunks: 4 V D bytes, 2.3 GiB for an 8B model, more than the activations of a short sequence. Here
the sum over tokens is the inner loop, so that fp32 sums exist for one block of rows only. It costs
a fourth product with the head's weight, and an fp32 gradient of the normed hidden states, O(N D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from streambp.buffers import keeps_graph, own
from streambp.chunks import Chunk, partition
from streambp.gradients import GradientSums, adds_in_place, detached_parameters, product
from streambp.labels import label

Tensor = torch.Tensor

VOCABULARY_BLOCK = 8192


@dataclass(kw_only=True)
class BlockedHeadCall:
    """A plain linear head after an optional norm.

    norm: (C, D) -> (C, D), or `None`; norm_modules: whose parameters it uses. weight: (V, D).
    labels: (N,). chunk_size: tokens whose whole logits fit in memory; tiles have as many elements.
    """

    norm: Callable[[Tensor], Tensor] | None
    norm_modules: Sequence[torch.nn.Module]
    weight: Tensor
    labels: Tensor
    chunk_size: int
    ignore_index: int = -100
    overwrite: bool = False

    def __post_init__(self) -> None:
        self.counts = self.labels != self.ignore_index  # (N,)
        self.targets = self.labels.where(self.counts, 0)  # (N,)

    def normed(self, rows: Tensor) -> Tensor:
        """What the head's weight is applied to."""
        return rows if self.norm is None else self.norm(rows)

    def norm_parameters(self) -> list[Tensor]:
        """The norm's trainable parameters."""
        return [p for m in self.norm_modules for p in m.parameters() if p.requires_grad]

    def blocks(self) -> tuple[Chunk, ...]:
        """Blocks of vocabulary entries."""
        return partition(self.weight.shape[0], VOCABULARY_BLOCK)

    def tiles(self) -> tuple[Chunk, ...]:
        """Tokens that meet one block at a time."""
        vocabulary = self.weight.shape[0]
        grown = self.chunk_size * vocabulary // min(vocabulary, VOCABULARY_BLOCK)
        return partition(self.labels.numel(), max(1, grown))


class BlockedCrossEntropy(torch.autograd.Function):
    """`-(log p(labels)).sum() / divisor`, 0-dim fp32, of hidden (..., D) with N rows.

    Equivalent to `F.cross_entropy(F.linear(norm(hidden), weight), labels, reduction="sum")` over
    the divisor. Saved: hidden and the log-sum-exps, O(N D). Recomputed: norm and logits.

    Where the weight has a gradient already and only autograd would add to it, finished blocks are
    added to it directly, so that no second tensor of its size exists.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: BlockedHeadCall,
        divisor: Tensor,
        hidden: Tensor,
        weight: Tensor,
        *norm_params: Tensor,
    ) -> Tensor:
        rows = hidden.flatten(0, -2)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        lse = hidden.new_empty(rows.shape[0], dtype=wide)
        for chunk in partition(rows.shape[0], call.chunk_size):
            span = slice(chunk.start, chunk.end)
            logits = label(call.normed(rows[span]) @ weight.t(), "logits").to(wide)
            lse[span] = torch.logsumexp(logits, -1)
            picked = logits.gather(-1, call.targets[span].unsqueeze(-1)).squeeze(-1)
            loss += (lse[span] - picked).where(call.counts[span], 0).sum()
        ctx.save_for_backward(hidden, weight, lse, divisor)
        ctx.call, ctx.norm_params = call, norm_params
        return loss / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, lse, divisor = ctx.saved_tensors
        call: BlockedHeadCall = ctx.call
        rows = hidden.detach().flatten(0, -2)
        scale = call.counts.to(lse.dtype) * (grad / divisor)  # (N,)
        dnormed, dweight = _weight_pass(call, rows, weight, lse, scale, ctx.needs_input_grad[3])
        dhidden = None
        if ctx.needs_input_grad[2]:
            write_over = call.overwrite and not keeps_graph()
            dhidden = hidden.detach() if write_over else hidden.new_empty(hidden.shape)
            own(label(dhidden, "hidden_grads"))
        norm_grads = _norm_pass(call, rows, dnormed, dhidden, ctx.norm_params)
        return None, None, dhidden, dweight, *norm_grads


def _weight_pass(
    call: BlockedHeadCall,
    rows: Tensor,
    weight: Tensor,
    lse: Tensor,
    scale: Tensor,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """fp32 gradient of the normed rows (N, D) and the weight's (V, D), `None` if delivered."""
    wide = lse.dtype
    dnormed = label(rows.new_zeros(rows.shape, dtype=wide), "hidden_grads")
    in_place = need_weight and adds_in_place(call.weight)
    dweight = None
    if need_weight and not in_place:
        dweight = label(torch.empty_like(weight), "weight_grad_buffers")
    for block in call.blocks():
        part = weight[block.start : block.end]
        total: Tensor | None = None
        for tile in call.tiles():
            span = slice(tile.start, tile.end)
            normed = call.normed(rows[span])
            dlogits = _dlogits(call, normed @ part.t(), lse[span], scale[span], span, block)
            product(dlogits.t(), part, dnormed[span])
            if need_weight:
                total = product(dlogits, normed, total)
                label(total, "weight_grad_buffers")
        if total is None:
            continue
        if dweight is not None:
            dweight[block.start : block.end] = total
        elif call.weight.grad is not None:
            call.weight.grad[block.start : block.end] += total
    return dnormed, dweight


def _dlogits(
    call: BlockedHeadCall, logits: Tensor, lse: Tensor, scale: Tensor, span: slice, block: Chunk
) -> Tensor:
    """Gradient (C, U) of the loss by one tile of logits, in their dtype."""
    label(logits, "logits")
    grad = label(logits.to(lse.dtype, copy=True), "logits")
    grad.sub_(lse.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1))
    index = call.targets[span] - block.start
    inside = (index >= 0) & (index < block.size)
    index = index.where(inside, 0).unsqueeze(-1)
    grad.scatter_add_(-1, index, (-scale * inside).unsqueeze(-1))
    return grad.to(logits.dtype)


def _norm_pass(
    call: BlockedHeadCall,
    rows: Tensor,
    dnormed: Tensor,
    dhidden: Tensor | None,
    norm_params: Sequence[Tensor],
) -> list[Tensor | None]:
    """Write the gradient of the rows into `dhidden`; returns the norm's parameter gradients."""
    drows = None if dhidden is None else dhidden.view_as(rows)
    chunks = call.tiles()
    with detached_parameters(call.norm_modules, norm_params) as leaves:
        sums = GradientSums(leaves, len(chunks))
        for chunk in chunks:
            span = slice(chunk.start, chunk.end)
            if call.norm is None:
                if drows is not None:
                    drows[span] = dnormed[span]
                continue
            with torch.enable_grad():
                part = rows[span].detach().requires_grad_()
                normed = call.norm(part)
            grads = torch.autograd.grad(normed, [part, *leaves], dnormed[span].to(normed.dtype))
            if drows is not None:
                drows[span] = grads[0]
            sums.add_all(grads[1:])
        return sums.take()
