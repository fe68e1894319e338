"""Live bytes by category over the ops of a step, thinned for a file or a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streambp.sim.tracker import Block


class Timeline:
    """Columns of equal length: op index, phase, live bytes, and live bytes of each category."""

    def __init__(self) -> None:
        self._op_index: list[int] = []
        self._phase: list[str] = []
        self._live_bytes: list[int] = []
        self._by_category: list[dict[str, int]] = []

    def __len__(self) -> int:
        return len(self._op_index)

    def append(
        self, op_index: int, phase: str, live_bytes: int, by_category: Mapping[str, int]
    ) -> None:
        """Add the state after one allocation or release."""
        self._op_index.append(op_index)
        self._phase.append(phase)
        self._live_bytes.append(live_bytes)
        self._by_category.append(dict(by_category))

    def to_dict(self, max_points: int = 2000) -> dict[str, Any]:
        """At most `max_points` points: of each window, the point with the most live bytes.

        Returns:
            {"op_index": [int], "phase": [str], "live_bytes": [int],
             "by_category_bytes": {category: [int]}}; the peak of the whole is always among them.
        """
        kept = _highest(self._live_bytes, max_points)
        categories = sorted({name for i in kept for name in self._by_category[i]})
        return {
            "op_index": [self._op_index[i] for i in kept],
            "phase": [self._phase[i] for i in kept],
            "live_bytes": [self._live_bytes[i] for i in kept],
            "by_category_bytes": {
                name: [self._by_category[i].get(name, 0) for i in kept] for name in categories
            },
        }


def timeline_of(blocks: Sequence[Block], max_points: int = 1000) -> dict[str, Any]:
    """The timeline of recorded blocks, as `Timeline.to_dict` gives it."""
    live_bytes, live = [], 0
    for block in blocks:
        for event in block.events:
            live += event.num_bytes
            live_bytes.append(live)
    kept = iter([*_highest(live_bytes, max_points), None])
    timeline, following, index = Timeline(), next(kept), -1
    by_category: Counter[str] = Counter()
    storages: dict[int, tuple[str, int]] = {}  # category and bytes
    for block in blocks:
        for event in block.events:
            index += 1
            category, num_bytes = storages.get(event.event_id, (event.category, 0))
            by_category[category] -= num_bytes
            num_bytes += event.num_bytes
            by_category[event.category] += num_bytes
            storages[event.event_id] = (event.category, num_bytes)
            if index == following:
                timeline.append(event.op_index, block.phase, live_bytes[index], by_category)
                following = next(kept)
    return timeline.to_dict(max_points)


def _highest(values: Sequence[int], max_points: int) -> list[int]:
    """Of each of at most `max_points` windows, the index of the highest value."""
    if max_points < 1:
        raise ValueError(f"max_points={max_points}: must be at least 1")
    window = max(1, -(-len(values) // max_points))
    return [
        max(range(first, min(first + window, len(values))), key=values.__getitem__)
        for first in range(0, len(values), window)
    ]
