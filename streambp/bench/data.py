"""Batches of a run: real text packed to the sequence length, or random ids.

Shapes: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from streambp.bench.config import DataConfig
from streambp.bench.documents import Documents, documents_of
from streambp.bench.tokenizers import Tokenizer, tokenizer_at

__all__ = ["batches", "to_device"]


def batches(
    cfg: DataConfig, *, vocab_size: int, batch_size: int, seq_len: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches: ``input_ids`` and ``labels``, (B, T) int64 each, on the CPU.

    Documents come in an order decided by ``seed``, a new order every epoch; they are joined end to
    end and cut into rows of T tokens, without padding, so every token has a label and no mask is
    needed. A row may begin and end inside a document, and attention isn't stopped at the borders
    between documents. ``data=random``: uniform ids of the model's vocabulary, as for measuring
    time and memory alone.

    Errors, before the first batch: ``ValueError`` when the tokenizer has more ids than the model,
    a source can't be read, or all its text together doesn't fill one batch.
    """
    generator = torch.Generator().manual_seed(seed)
    if cfg.name == "random":
        return _random(vocab_size, batch_size, seq_len, generator)
    tokenizer = tokenizer_at(cfg.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"data.tokenizer={cfg.tokenizer or 'bytes'}: its {tokenizer.vocab_size} ids exceed the "
            f"model's vocabulary of {vocab_size}; use a model whose vocab_size is at least "
            f"{tokenizer.vocab_size}, another tokenizer, or data=random"
        )
    documents = documents_of(cfg)
    packed = _packed(cfg, documents, tokenizer, batch_size, seq_len, generator)
    return _chained(next(packed), packed)


def to_device(
    batch: dict[str, torch.Tensor], device: str | torch.device
) -> dict[str, torch.Tensor]:
    """The batch on ``device``."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids.clone()}


def _random(
    vocab_size: int, batch_size: int, seq_len: int, generator: torch.Generator
) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield _batch(torch.randint(vocab_size, (batch_size, seq_len), generator=generator))


def _packed(
    cfg: DataConfig,
    documents: Documents,
    tokenizer: Tokenizer,
    batch_size: int,
    seq_len: int,
    generator: torch.Generator,
) -> Iterator[dict[str, torch.Tensor]]:
    needed = batch_size * seq_len
    waiting: list[torch.Tensor] = []
    num_waiting = num_seen = 0
    while True:
        for index in torch.randperm(len(documents), generator=generator).tolist():
            ids = tokenizer.encode(documents[index])
            waiting.append(ids)
            num_waiting += len(ids)
            num_seen += len(ids)
            while num_waiting >= needed:
                joined = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                yield _batch(joined[:needed].view(batch_size, seq_len).clone())
                waiting = [joined[needed:]]
                num_waiting -= needed
        if num_seen < needed:
            raise ValueError(
                f"data.path={cfg.path!r}: {num_seen} tokens of text don't fill one batch of "
                f"batch_size={batch_size} x seq_len={seq_len} = {needed} tokens; give more text, "
                "or lower seq_len or batch_size"
            )


def _chained(
    first: dict[str, torch.Tensor], rest: Iterator[dict[str, torch.Tensor]]
) -> Iterator[dict[str, torch.Tensor]]:
    yield first
    yield from rest
