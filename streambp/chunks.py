"""Partition of a sequence into chunks. T sequence length, C chunk size (tokens)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """The half-open token range `[start, end)` of one chunk."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def partition(length: int, chunk_size: int) -> tuple[Chunk, ...]:
    """Cut `length` tokens into chunks of `chunk_size`; only the last may be shorter.

    A chunk size above the length gives one chunk; length 0 gives none.
    Raises `ValueError` for a chunk size below 1.
    """
    check_chunk_size("chunk_size", chunk_size)
    starts = range(0, length, chunk_size)
    return tuple(Chunk(start, min(start + chunk_size, length)) for start in starts)


def check_chunk_size(field: str, value: int) -> None:
    """Raise `ValueError` naming `field` unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r}: a chunk holds a whole number of tokens, at least 1.")
