"""Loops over many chunks, shortened to the few that decide the peak.

Memory that outlives an iteration is allocated for the whole sequence, and a chunk needs no less
than the one before it, so the first two and the last two chunks reach every peak of a loop. Costs
of the chunks in between grow linearly from one visited chunk to the next, so each visited chunk
is counted with the weight that makes the sum exact.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any
from unittest import mock

from streambp import chunks
from streambp.chunks import Chunk

#: Loops up to this long are run whole.
_WHOLE = 6

OnWeight = Callable[[Fraction], None]


def visited(num_chunks: int, bends: Sequence[int] = ()) -> list[int]:
    """Indices to run of a loop over `num_chunks`: both ends, and around every bend.

    bends: indices from which a chunk's cost stops growing as before (a sliding window fills up).
    """
    if num_chunks <= _WHOLE:
        return list(range(num_chunks))
    wanted = {0, 1, num_chunks - 2, num_chunks - 1}
    for bend in bends:
        wanted.update(range(bend - 1, bend + 3))
    return sorted(index for index in wanted if 0 <= index < num_chunks)


def weights_of(indices: Sequence[int]) -> list[Fraction]:
    """How many chunks each visited one stands for, costs being linear between neighbours.

    The m chunks left out between two neighbours count m/2 times each neighbour's cost. The first
    and the last weigh 1, so the weight a loop ends with is 1 in either direction.
    """
    gaps = [right - left - 1 for left, right in itertools.pairwise(indices)]
    return [
        1 + Fraction(before + after, 2)
        for before, after in zip([0, *gaps], [*gaps, 0], strict=True)
    ]


class _Weights:
    """The weight of what runs now: of the chunk last taken by index, times those of the chunks
    that running iterations stand at (a loop within a loop)."""

    def __init__(self, on_weight: OnWeight):
        self._on_weight = on_weight
        self._taken = Fraction(1)
        self._iterating: list[Fraction] = []

    def take(self, weight: Fraction) -> None:
        self._taken = weight
        self._tell()

    @contextlib.contextmanager
    def at(self, weight: Fraction) -> Iterator[None]:
        self._iterating.append(weight)
        self._tell()
        try:
            yield
        finally:
            self._iterating.pop()
            self._tell()

    def _tell(self) -> None:
        self._on_weight(self._taken * math.prod(self._iterating, start=Fraction(1)))


class VisitedChunks(tuple[Chunk, ...]):
    """The visited chunks of a partition; says which weight applies whenever one is taken."""

    _each: list[Fraction]
    _weights: _Weights
    _iterations: int

    @classmethod
    def of(cls, whole: Sequence[Chunk], bends: Sequence[int], weights: _Weights) -> VisitedChunks:
        """Those of the whole partition that have to be run."""
        indices = visited(len(whole), bends)
        self = cls(whole[index] for index in indices)
        self._each = weights_of(indices)
        self._weights = weights
        self._iterations = 0
        return self

    def __iter__(self) -> Iterator[Chunk]:
        self._iterations += 1
        try:
            for chunk, weight in zip(super().__iter__(), self._each, strict=True):
                with self._weights.at(weight):
                    yield chunk
        finally:
            self._iterations -= 1

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, int) and not self._iterations:
            self._weights.take(self._each[position])
        return super().__getitem__(position)


@contextlib.contextmanager
def shortened(window: int | None, on_weight: OnWeight) -> Iterator[None]:
    """Within it, a sequence is cut into the visited chunks alone, wherever the library cuts one.

    To be entered when the method has been applied: all that cuts a sequence is imported then.
    window: the model's sliding window in tokens. on_weight: told each visited chunk's weight.
    Results are meaningless then; shapes, memory and weighted costs are those of the whole loop.
    """
    partition, weights = chunks.partition, _Weights(on_weight)

    def visited_partition(length: int, chunk_size: int) -> tuple[Chunk, ...]:
        bends = [-(-window // chunk_size)] if window else []
        return VisitedChunks.of(partition(length, chunk_size), bends, weights)

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("streambp.") and getattr(module, "partition", None) is partition:
                stack.enter_context(mock.patch.object(module, "partition", visited_partition))
        yield
