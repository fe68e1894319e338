"""Settings of the streamed backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from streambp.chunks import check_chunk_size

DEFAULT_CHUNK_SIZE = 768
DEFAULT_HEAD_CHUNK_SIZE = 768
OFFLOAD = ("none",)


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How `streambp.enable` streams a model: settings change memory and time, not the result.

    chunk_size: tokens per decoder-layer chunk; `None` takes `DEFAULT_CHUNK_SIZE`.
    head_chunk_size: tokens per chunk of final norm, head and loss; `None` takes
        `DEFAULT_HEAD_CHUNK_SIZE`. A chunk's logits take `head_chunk_size * V` elements.
    keep_kv: keep every layer's keys and values from forward to backward, `2 * K * E` elements per
        token and layer, instead of projecting them again.
    keep_attention: keep every layer's attention output and log-sum-exp, `H * (E + 1)` elements per
        token and layer, so that no attention is computed twice.
    recompute_head: form the head's weight gradient in the backward pass, a block of the vocabulary
        at a time, so that no fp32 tensor of its size (4 * V * D bytes) is needed; costs one more
        product with the head's weight and 4 * D bytes per token. Needs a plain linear head without
        soft-cap; others ignore it.
    split_sums: sum a layer's bf16 weight gradients over its chunks in fp32 numbers whose upper half
        is the gradient tensor itself: 2 bytes a parameter of one layer beside it, not 4, for the
        same sums. Moves about 20 bytes more a parameter and chunk, so it suits large chunks. Where
        there is no gradient to add to yet, where a hook or a process group waits for it, and for
        vectors and other dtypes, sums are separate fp32 tensors as without it.
    offload: where saved tensors wait for the backward pass; only 'none' (the device) so far.

    Raises `ValueError` naming the field, for chunk sizes below 1, switches that are not bool and
    unknown places to offload to.
    """

    chunk_size: int | None = None
    head_chunk_size: int | None = None
    keep_kv: bool = False
    keep_attention: bool = False
    recompute_head: bool = False
    split_sums: bool = False
    offload: str = "none"

    def __post_init__(self) -> None:
        for field in ("chunk_size", "head_chunk_size"):
            if getattr(self, field) is not None:
                check_chunk_size(field, getattr(self, field))
        for field in ("keep_kv", "keep_attention", "recompute_head", "split_sums"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r}: use True or False.")
        if self.offload not in OFFLOAD:
            raise ValueError(f"offload={self.offload!r}: use one of {', '.join(OFFLOAD)}.")

    @property
    def layer_chunk(self) -> int:
        """Tokens per decoder-layer chunk, the default filled in."""
        return self.chunk_size or DEFAULT_CHUNK_SIZE

    @property
    def head_chunk(self) -> int:
        """Tokens per head chunk, the default filled in."""
        return self.head_chunk_size or DEFAULT_HEAD_CHUNK_SIZE
