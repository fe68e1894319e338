"""Which keys a chunk of queries may see, answered one block at a time and never as T x T.

B batch, H query heads, T sequence, C chunk (queries), N keys of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import masking_utils

from streambp.chunks import Chunk

Kind = Literal["full", "causal", "masked"]


@dataclass(frozen=True)
class Block:
    """Keys `[start, end)` as seen by one chunk.

    kind: 'full' (every query sees every key), 'causal' (the chunk's own keys, lower triangle) or
    'masked' (ask the mask).
    """

    start: int
    end: int
    kind: Kind


def causal_blocks(chunk: Chunk, key_start: int = 0) -> list[Block]:
    """The blocks of plain causal attention from key `key_start` on."""
    blocks = [Block(chunk.start, chunk.end, "causal")]
    if key_start < chunk.start:
        blocks.insert(0, Block(key_start, chunk.start, "full"))
    return blocks


def negative(dtype: torch.dtype) -> float:
    """The additive bias of a key that may not be seen.

    Finite, so that a row that sees nothing in one block still merges with the others; adding a
    score to it cannot overflow.
    """
    return torch.finfo(dtype).min / 2


class ChunkMask(ABC):
    """A mask that is not plain causal. Subclasses say what is visible in a block."""

    @abstractmethod
    def visible(self, chunk: Chunk, start: int, end: int) -> torch.Tensor:
        """Bool (B or 1, 1 or H, C, end - start): may the chunk's queries see these keys?"""

    def bias(self, chunk: Chunk, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The additive bias of a block, same shape as `visible`."""
        visible = self.visible(chunk, start, end)
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return bias.masked_fill_(~visible, negative(dtype))

    def plan(self, chunks: tuple[Chunk, ...]) -> list[list[Block]]:
        """Each chunk's blocks: keys no query sees are left out, masks kept only where needed.

        Looks at the mask's values once for a whole partition, in one transfer to the host.
        """
        plans = self.__dict__.setdefault("_plans", {})
        if chunks not in plans:
            plans[chunks] = self._plan(chunks)
        return plans[chunks]

    def _plan(self, chunks: tuple[Chunk, ...]) -> list[list[Block]]:
        facts = [self._facts(chunk) for chunk in chunks]
        if isinstance(facts[0], FakeTensor):  # no values to look at: assume every mask is needed
            return [_worst_case(chunk) for chunk in chunks]
        rows = torch.stack(facts).tolist()
        return [_blocks(chunk, *row) for chunk, row in zip(chunks, rows, strict=True)]

    def _facts(self, chunk: Chunk) -> torch.Tensor:
        """(3,): first visible key before the chunk, is the rest visible to all, is it causal."""
        before = self.visible(chunk, 0, chunk.start)
        seen = before.flatten(0, -2).any(0)
        index = torch.arange(chunk.start, device=before.device)
        first = torch.where(seen, index, chunk.start).amin() if chunk.start else seen.new_tensor(0)
        full = (before | (index < first)).all()
        own = self.visible(chunk, chunk.start, chunk.end)
        causal = (own == torch.ones_like(own).tril()).all() & self._causal_weights(chunk)
        return torch.stack([first, full.long(), causal.long()])

    def _causal_weights(self, chunk: Chunk) -> torch.Tensor | bool:
        """False where visible keys carry an additive bias of their own."""
        return True


def _worst_case(chunk: Chunk) -> list[Block]:
    own = Block(chunk.start, chunk.end, "masked")
    return [Block(0, chunk.start, "masked"), own] if chunk.start else [own]


def _blocks(chunk: Chunk, first: int, full: int, causal: int) -> list[Block]:
    blocks = [Block(chunk.start, chunk.end, "causal" if causal else "masked")]
    if first < chunk.start:
        blocks.insert(0, Block(first, chunk.start, "full" if full else "masked"))
    return blocks


class SlidingMask(ChunkMask):
    """A sliding window and nothing else: query i sees keys i - window < j <= i."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.window = window
        self.device = device

    def visible(self, chunk: Chunk, start: int, end: int) -> torch.Tensor:
        query = torch.arange(chunk.start, chunk.end, device=self.device)[:, None]
        key = torch.arange(start, end, device=self.device)[None, :]
        return ((key <= query) & (key > query - self.window))[None, None]

    def _plan(self, chunks: tuple[Chunk, ...]) -> list[list[Block]]:
        return [self._chunk_plan(chunk) for chunk in chunks]

    def _chunk_plan(self, chunk: Chunk) -> list[Block]:
        key_start = max(0, chunk.start - self.window + 1)
        all_see = max(key_start, min(chunk.end - self.window, chunk.start))
        own: Kind = "causal" if chunk.size <= self.window else "masked"
        blocks = [
            Block(key_start, all_see, "masked"),
            Block(all_see, chunk.start, "full"),
            Block(chunk.start, chunk.end, own),
        ]
        return [block for block in blocks if block.start < block.end]


class FunctionMask(ChunkMask):
    """transformers' own mask function (causal, windows, packed rows) with padding, on demand.

    function: `(b, h, q, k) -> bool`, index tensors that broadcast. padding: bool (B, T), or `None`.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        padding: torch.Tensor | None,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self.function = function
        self.padding = padding
        self.batch_size = batch_size
        self.device = device

    def visible(self, chunk: Chunk, start: int, end: int) -> torch.Tensor:
        batch = torch.arange(self.batch_size, device=self.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        query = torch.arange(chunk.start, chunk.end, device=self.device)[None, None, :, None]
        key = torch.arange(start, end, device=self.device)[None, None, None, :]
        visible = self.function(batch, head, query, key)
        visible = visible.expand(-1, -1, chunk.size, end - start)
        if self.padding is not None:
            visible = visible & self.padding[:, None, None, start:end]
        return visible


class DenseMask(ChunkMask):
    """A 4-D mask the caller made: bool (True = visible) or additive, (B or 1, 1 or H, T, T).

    Raises `ValueError` where it lets a query see a later key: such a mask can't be streamed.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        if mask.requires_grad:
            raise ValueError("attention_mask requires grad: streambp gives masks no gradient.")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(
                f"attention_mask of dtype {mask.dtype}: a 4-D mask is bool (True = visible) or "
                "floating point (added to the scores)."
            )
        if mask.shape[-1] != mask.shape[-2]:
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)}: a streamed pass needs as many keys "
                "as queries in a 4-D mask."
            )
        self.mask = mask

    def visible(self, chunk: Chunk, start: int, end: int) -> torch.Tensor:
        part = self._part(chunk, start, end)
        return part if part.dtype == torch.bool else part > self._hidden(part.dtype)

    def bias(self, chunk: Chunk, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        if self.mask.dtype == torch.bool:
            return super().bias(chunk, start, end, dtype)
        visible = self.visible(chunk, start, end)
        return self._part(chunk, start, end).to(dtype).masked_fill(~visible, negative(dtype))

    def _part(self, chunk: Chunk, start: int, end: int) -> torch.Tensor:
        return self.mask[:, :, chunk.start : chunk.end, start:end]

    @staticmethod
    def _hidden(dtype: torch.dtype) -> float:
        """At or below this bias a key has no weight."""
        return max(-1e9, torch.finfo(dtype).min / 2)

    def _facts(self, chunk: Chunk) -> torch.Tensor:
        facts = super()._facts(chunk)
        if self.mask.dtype != torch.bool:
            seen = self._part(chunk, 0, chunk.start)
            biased = ((seen > self._hidden(seen.dtype)) & (seen != 0)).any()
            facts = torch.stack([facts[0], facts[1] * ~biased, facts[2]])
        rest = self.visible(chunk, chunk.start, self.mask.shape[-1])
        future = rest & ~torch.ones_like(rest).tril()
        return torch.cat([facts, future.any().long()[None]])

    def _causal_weights(self, chunk: Chunk) -> torch.Tensor | bool:
        if self.mask.dtype == torch.bool:
            return True
        own = self._part(chunk, chunk.start, chunk.end)
        return ~((own > self._hidden(own.dtype)) & (own != 0)).any()

    def _plan(self, chunks: tuple[Chunk, ...]) -> list[list[Block]]:
        if self.mask.shape[-1] != chunks[-1].end:
            raise ValueError(
                f"attention_mask of shape {tuple(self.mask.shape)} for {chunks[-1].end} tokens."
            )
        facts = torch.stack([self._facts(chunk) for chunk in chunks])
        if isinstance(facts, FakeTensor):
            return [_worst_case(chunk) for chunk in chunks]
        rows = facts.tolist()
        if any(row[3] for row in rows):
            raise ValueError(
                "attention_mask lets a token see later tokens: bidirectional attention can't be "
                "streamed. Pass a causal mask, or streambp.disable(model) for this model."
            )
        return [_blocks(chunk, *row[:3]) for chunk, row in zip(chunks, rows, strict=True)]


def mask_interface(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int | None = None,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> ChunkMask | None:
    """The mask function transformers calls while a model streams; `None` is plain causal.

    Raises `ValueError` for masks that are not causal or not made of index comparisons.
    """
    if q_length is None:  # transformers before it passed lengths: positions instead
        q_length = kwargs["cache_position"].shape[0]
    if kv_length != q_length:
        raise ValueError(
            f"streambp: {q_length} queries but {kv_length} keys; a streamed pass starts from an "
            "empty cache and an attention_mask as long as the input."
        )
    if attention_mask is not None and attention_mask.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: a streamed pass needs one "
            f"entry per token, {(batch_size, kv_length)}, or a 4-D mask."
        )
    if use_vmap or not _only_restricts(mask_function):
        raise ValueError(
            "streambp: the model adds a mask of its own that may look ahead (bidirectional "
            "attention or a custom mask function); it can't be streamed exactly."
        )
    if attention_mask is None and allow_is_causal_skip:
        if mask_function is masking_utils.causal_mask_function:
            return None
        if local_size is not None and _is_sliding(mask_function):
            device = kwargs.get("device") or _device_of(kwargs)
            return SlidingMask(local_size, device) if local_size < q_length else None
    device = attention_mask.device if attention_mask is not None else _device_of(kwargs)
    return FunctionMask(mask_function, attention_mask, batch_size, device)


def _device_of(kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        device = kwargs["cache_position"].device
    return torch.device(device)


def _parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """A mask function and every function in its closures."""
    found, waiting = [], [function]
    while waiting:
        function = waiting.pop()
        found.append(function)
        for cell in getattr(function, "__closure__", None) or ():
            content = cell.cell_contents
            for item in content if isinstance(content, tuple) else (content,):
                if callable(item) and not isinstance(item, torch.Tensor):
                    waiting.append(item)
    return found


def _only_restricts(function: Callable[..., Any]) -> bool:
    """True where the mask is plain causal with further conditions that only take keys away."""
    parts = _parts(function)
    widens = ("or_masks", "blockwise", "bidirectional")
    if any(word in getattr(part, "__qualname__", "") for part in parts for word in widens):
        return False
    return masking_utils.causal_mask_function in parts


def _is_sliding(function: Callable[..., Any]) -> bool:
    names = [getattr(part, "__qualname__", "") for part in _parts(function)]
    return len(names) == 3 and any(name.startswith("sliding_window_overlay") for name in names)
