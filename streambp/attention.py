"""Attention of one chunk of queries over every key before it and in it.

B batch, T sequence, C chunk, H query heads, K key/value heads, R = H/K heads a group, E head dim.

Equivalent to `softmax(q @ k[:, :, :end]^T * scale + bottom-right causal mask) @ v[:, :, :end]`.
`F.scaled_dot_product_attention(is_causal=True)` is not: it aligns top-left where lengths differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from streambp import kernels
from streambp.chunks import Chunk
from streambp.kernels import Scoring
from streambp.kv import KVStream
from streambp.labels import label
from streambp.masks import Block, ChunkMask, causal_blocks, mask_interface

NAME = "streambp"
KEY_BLOCK = 8192  # keys a backward kernel sees at once: bounds its temporaries, O(KEY_BLOCK)

Tensor = torch.Tensor


class KeptAttention:
    """One layer's attention output (B, H, T, E') and log-sum-exp (B, H, T), filled by chunks.

    In memory the output lies as (B, T, H, E'), which is how the layer goes on with it.
    """

    def __init__(self, length: int, out: Tensor | None = None, lse: Tensor | None = None) -> None:
        self._length = length
        self.out, self.lse = out, lse

    def store(self, chunk: Chunk, out: Tensor, lse: Tensor) -> None:
        """Keep a chunk's output (B, H, C, E') and log-sum-exp (B, H, C)."""
        if self.out is None or self.lse is None:
            batch, heads, _, dim = out.shape
            whole = out.new_empty(batch, self._length, heads, dim)
            self.out = label(whole, "saved_attention").transpose(1, 2)
            self.lse = label(lse.new_empty(batch, heads, self._length), "saved_attention")
        self.out[:, :, chunk.start : chunk.end] = out
        self.lse[:, :, chunk.start : chunk.end] = lse

    def of(self, chunk: Chunk) -> tuple[Tensor, Tensor] | None:
        """What `store` was given for the chunk, or `None`."""
        if self.out is None or self.lse is None:
            return None
        span = slice(chunk.start, chunk.end)
        # Detached, because the output becomes that of a function with a graph of its own.
        return self.out[:, :, span].detach(), self.lse[:, :, span].contiguous()


@dataclass(kw_only=True)
class ChunkView:
    """What the attention of one chunk needs besides its query. Travels as `attention_mask`.

    kept: where a pass without gradients stores its output, and one with them finds it; `None`
    computes it each time.
    """

    kv: KVStream
    chunk: Chunk
    blocks: list[Block]
    mask: ChunkMask | None
    kept: KeptAttention | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            f"streambp: this model's attention looks into its mask itself (.{name}); it can't be "
            "streamed exactly."
        )

    @property
    def span(self) -> slice:
        """The chunk's tokens."""
        return slice(self.chunk.start, self.chunk.end)

    def keys(self, block: Block) -> tuple[Tensor, Tensor]:
        """Keys (B, K, N, E) and values (B, K, N, E') of a block."""
        assert self.kv.keys is not None and self.kv.values is not None
        span = slice(block.start, block.end)
        return self.kv.keys[:, :, span], self.kv.values[:, :, span]


def plan(mask: ChunkMask | None, chunks: tuple[Chunk, ...]) -> list[list[Block]]:
    """Each chunk's blocks of keys under `mask` (`None`: plain causal)."""
    return [causal_blocks(chunk) for chunk in chunks] if mask is None else mask.plan(chunks)


def attend(q: Tensor, view: ChunkView, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Output (B, H, C, E') and log-sum-exp (B, H, C) of q (B, H, C, E) over the view's keys.

    Rows that see no key at all give zeros, and zero gradients. O(C) memory beside the keys.
    """
    blocks = view.blocks
    if _one_flash_call(q, view, scoring):
        span = Block(blocks[0].start, blocks[-1].end, "causal")
        return kernels.CUDA_FLASH.forward(q, *view.keys(span), None, True, scoring)
    out = lse = None
    # The math kernel holds all scores of a block: there the forward pass takes small blocks too,
    # the same as the backward pass, so that dropout draws the same weights.
    for block in blocks if scoring.plain else _pieces(blocks):
        part, part_lse = _block_forward(q, view, block, _seeded(scoring, block))
        if out is None or lse is None:
            out, lse = part, part_lse
        else:
            merged = torch.logaddexp(lse, part_lse)
            out = _weigh(out, lse, merged).add_(_weigh(part, part_lse, merged))
            lse = merged
    assert out is not None and lse is not None
    out = out.to(q.dtype)
    if any(block.kind == "masked" for block in blocks):
        blind = lse < torch.finfo(q.dtype).min / 4
        out = out.masked_fill(blind.unsqueeze(-1), 0)
        lse = lse.masked_fill(blind, 0)
    return out, lse


def _weigh(out: Tensor, lse: Tensor, merged: Tensor) -> Tensor:
    """A block's share of the merged output, in the log-sum-exp's dtype."""
    return out * torch.exp(lse - merged).unsqueeze(-1)


def _one_flash_call(q: Tensor, view: ChunkView, scoring: Scoring) -> bool:
    """True where one bottom-right causal call of the CUDA kernel covers all blocks."""
    kinds = [block.kind for block in view.blocks]
    _, values = view.keys(view.blocks[-1])
    kernel = kernels.select(q, values, biased=False, scoring=scoring)
    return kernel is kernels.CUDA_FLASH and kinds in (["causal"], ["full", "causal"])


def attend_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, view: ChunkView, scoring: Scoring
) -> Tensor:
    """Gradient of q (B, H, C, E); gradients of keys and values are added to the view's buffers.

    Each block of at most `KEY_BLOCK` keys is differentiated with the merged `out` and `lse`.
    """
    kv = view.kv
    assert kv.grad_keys is not None and kv.grad_values is not None
    pieces = _pieces(view.blocks)
    dq_total: Tensor | None = None
    for block in pieces:
        dq, dk, dv = _block_backward(grad, q, out, lse, view, block, _seeded(scoring, block))
        kv.grad_keys[:, :, block.start : block.end] += dk
        kv.grad_values[:, :, block.start : block.end] += dv
        if dq_total is None:
            dq_total = dq if len(pieces) == 1 else dq.to(torch.promote_types(dq.dtype, lse.dtype))
        else:
            dq_total += dq
    assert dq_total is not None
    return dq_total.to(q.dtype)


def _pieces(blocks: list[Block]) -> list[Block]:
    """The blocks, all but causal ones cut to `KEY_BLOCK` keys."""
    pieces = []
    for block in blocks:
        step = KEY_BLOCK if block.kind != "causal" else block.end - block.start
        for start in range(block.start, block.end, step):
            pieces.append(Block(start, min(start + step, block.end), block.kind))
    return pieces


def _seeded(scoring: Scoring, block: Block) -> Scoring:
    """The scoring of one block, which drops weights of its own."""
    if scoring.dropout == 0.0:
        return scoring
    return replace(scoring, seed=scoring.seed + block.start)


def _fold(t: Tensor, heads: int) -> Tensor:
    """(B, H, C, E) -> (B, K, R*C, E): a group's queries become rows over their one key head.

    Rows of a block are independent of each other, so keys need no copy per query head.
    """
    return t.unflatten(1, (heads, -1)).flatten(2, 3)


def _unfold(t: Tensor, length: int) -> Tensor:
    """(B, K, R*C, ...) -> (B, H, C, ...)."""
    return t.unflatten(2, (-1, length)).flatten(1, 2)


def _block_bias(q: Tensor, view: ChunkView, block: Block, heads: int) -> Tensor | None:
    """The folded bias (B or 1, 1 or K, R*C, N) of a masked block."""
    if block.kind != "masked":
        return None
    assert view.mask is not None
    bias = view.mask.bias(view.chunk, block.start, block.end, q.dtype)
    group = q.shape[1] // heads
    if bias.shape[1] == 1:
        return bias if group == 1 else bias.repeat(1, 1, group, 1)
    return _fold(bias, heads)


def _block_forward(
    q: Tensor, view: ChunkView, block: Block, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    k, v = view.keys(block)
    heads = k.shape[1]
    kernel = kernels.select(q, v, biased=block.kind == "masked", scoring=scoring)
    if block.kind == "causal":
        k, v = _per_query_head(k, q, kernel), _per_query_head(v, q, kernel)
        return kernel.forward(q, k, v, None, True, scoring)
    bias = _block_bias(q, view, block, heads)
    out, lse = kernel.forward(_fold(q, heads), k, v, bias, False, scoring)
    return _unfold(out, q.shape[2]), _unfold(lse, q.shape[2])


def _block_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    view: ChunkView,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = view.keys(block)
    heads = k.shape[1]
    kernel = kernels.select(q, v, biased=block.kind == "masked", scoring=scoring)
    if block.kind == "causal":
        k, v = _per_query_head(k, q, kernel), _per_query_head(v, q, kernel)
        dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, None, True, scoring)
        return dq, _per_key_head(dk, heads), _per_key_head(dv, heads)
    bias = _block_bias(q, view, block, heads)
    grad, folded, out, lse = (_fold(t, heads) for t in (grad, q, out, lse))
    dq, dk, dv = kernel.backward(grad, folded, k, v, out, lse, bias, False, scoring)
    return _unfold(dq, q.shape[2]), dk, dv


def _per_query_head(t: Tensor, q: Tensor, kernel: kernels.Kernel) -> Tensor:
    """Keys of a causal block copied per query head, unless the kernel groups heads itself."""
    group = q.shape[1] // t.shape[1]
    if group == 1 or kernel is kernels.CUDA_FLASH:
        return t
    return t.repeat_interleave(group, 1)


def _per_key_head(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[1] == heads else t.unflatten(1, (heads, -1)).sum(2)


class PrefixAttention(torch.autograd.Function):
    """`attend` with a backward that adds into the layer's running key and value gradients.

    The chunk's own key and value are inputs only to receive their finished gradients: chunks run
    in reverse order, so every later chunk has added its share by then.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, key: Tensor, value: Tensor, view: ChunkView, scoring: Scoring
    ) -> Tensor:
        saved = None if view.kept is None else view.kept.of(view.chunk)
        out, lse = attend(q, view, scoring) if saved is None else saved
        ctx.save_for_backward(q, out, lse)
        ctx.view, ctx.scoring, ctx.dtypes = view, scoring, (key.dtype, value.dtype)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse = ctx.saved_tensors
        view = ctx.view
        dq = attend_backward(grad, q, out, lse, view, ctx.scoring)
        dk, dv = view.kv.grad_keys[:, :, view.span], view.kv.grad_values[:, :, view.span]
        return dq, dk.to(ctx.dtypes[0]), dv.to(ctx.dtypes[1]), None, None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls while a layer streams.

    query: (B, H, C, E); key, value: what `KVStream.update` returned; attention_mask: a `ChunkView`.
    Returns (B, C, H, E'). Raises `ValueError` for attention this file does not compute.
    """
    view = attention_mask
    if not isinstance(view, ChunkView):
        raise ValueError("streambp: attention called outside a streamed layer.")
    for unsupported in ("s_aux", "position_bias", "head_mask"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"streambp: attention with {unsupported} can't be streamed.")
    current = view.kv.current
    if current is None or current[0] is not key or current[1] is not value:
        raise ValueError(
            f"streambp: {type(module).__name__} changes its keys or values after the KV cache; "
            "it can't be streamed exactly."
        )
    assert view.kv.keys is not None
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"streambp: {query.shape[1]} query heads don't divide over {key.shape[1]} key heads."
        )
    query = query.to(view.kv.keys.dtype)  # autocast leaves rotated queries in fp32
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    seed = int(torch.randint(2**62, ()).item()) if dropout > 0 else 0
    scoring = Scoring(scale=scale, softcap=softcap, dropout=dropout, seed=seed)
    if torch.is_grad_enabled():
        out = PrefixAttention.apply(query, key, value, view, scoring)
    else:
        out, lse = attend(query, view, scoring)
        if view.kept is not None:
            view.kept.store(view.chunk, out, lse)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_interface)
