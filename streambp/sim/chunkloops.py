"""Loops over many chunks, shortened to the few that decide the peak.

Memory that outlives an iteration is allocated for the whole sequence, and a chunk needs no less
than the one before it, so the first two and the last two chunks reach every peak of a loop. Costs
of the chunks in between grow linearly from one visited chunk to the next, so each visited chunk
is counted with the weight that makes the sum exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

#: Loops up to this long are run whole.
_WHOLE = 6


def visited_chunks(num_chunks: int, bends: Sequence[int] = ()) -> list[int]:
    """Indices to run of a loop over `num_chunks`: both ends, and around every bend.

    bends: indices from which a chunk's cost stops growing as before (a sliding window fills up).
    """
    if num_chunks <= _WHOLE:
        return list(range(num_chunks))
    wanted = {0, 1, num_chunks - 2, num_chunks - 1}
    for bend in bends:
        wanted.update(range(bend - 1, bend + 3))
    return sorted(index for index in wanted if 0 <= index < num_chunks)


def weights_of(visited: Sequence[int]) -> list[Fraction]:
    """How many chunks each visited one stands for, costs being linear between neighbours.

    The m chunks left out between two neighbours count m/2 times each neighbour's cost.
    """
    gaps = [right - left - 1 for left, right in itertools.pairwise(visited)]
    return [
        1 + Fraction(before + after, 2)
        for before, after in zip([0, *gaps], [*gaps, 0], strict=True)
    ]


class VisitedChunks(Sequence[int]):
    """The visited indices of one loop; says which weight applies while it is iterated."""

    def __init__(
        self, num_chunks: int, bends: Sequence[int], on_weight: Callable[[Fraction], None]
    ):
        self._indices = visited_chunks(num_chunks, bends)
        self._weights = weights_of(self._indices)
        self._on_weight = on_weight

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position):  # type: ignore[no-untyped-def]
        return self._indices[position]

    def __iter__(self) -> Iterator[int]:
        return self._walk(range(len(self._indices)))

    def __reversed__(self) -> Iterator[int]:
        return self._walk(reversed(range(len(self._indices))))

    def _walk(self, positions: Iterator[int] | range) -> Iterator[int]:
        try:
            for position in positions:
                self._on_weight(self._weights[position])
                yield self._indices[position]
        finally:
            self._on_weight(Fraction(1))
