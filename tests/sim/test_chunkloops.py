"""Weighted sums over the visited chunks equal sums over all chunks."""

from fractions import Fraction

import pytest

from streambp import chunks
from streambp.sim.chunkloops import shortened, visited, weights_of


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 6, 7, 8, 50, 221])
def test_the_weighted_sum_of_a_linear_cost_is_exact(num_chunks):
    indices = visited(num_chunks)
    assert indices[0] == 0 and indices[-1] == num_chunks - 1
    weighted = sum(w * (3 + 7 * i) for i, w in zip(indices, weights_of(indices), strict=True))
    assert weighted == sum(3 + 7 * i for i in range(num_chunks))
    assert sum(weights_of(indices)) == num_chunks


def test_a_cost_that_stops_growing_is_exact_with_its_bend():
    indices = visited(100, bends=[12])

    def cost(index):
        return min(index, 12)

    weighted = sum(w * cost(i) for i, w in zip(indices, weights_of(indices), strict=True))
    assert weighted == sum(map(cost, range(100)))


def test_the_library_cuts_sequences_short_inside_and_whole_outside():
    import streambp.head
    import streambp.model

    weights: list[Fraction] = []
    with shortened(None, weights.append):
        for module in (chunks, streambp.model, streambp.head):
            part = module.partition(105, 10)
            assert [c.start for c in part] == [0, 10, 90, 100]
            assert part[-1].end == 105
        sizes, counted = [], Fraction(0)
        for chunk in part:
            sizes.append(chunk.size)
            for _ in module.partition(70, 10):
                counted += weights[-1]
        assert sizes == [10, 10, 10, 5]
        assert counted == 11 * 7  # a loop within a loop counts as often as it would run
        assert weights[-1] == 1
        taken = []
        for index in reversed(range(len(part))):
            assert part[index].size in (5, 10)
            taken.append(weights[-1])
        assert taken == [1, Fraction(9, 2), Fraction(9, 2), 1]
    assert len(streambp.model.partition(105, 10)) == 11
