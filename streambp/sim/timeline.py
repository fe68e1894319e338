"""Live bytes by category over the ops of a step, thinned for a file or a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
        if max_points < 1:
            raise ValueError(f"max_points={max_points}: must be at least 1")
        window = max(1, -(-len(self) // max_points))
        kept = [
            max(range(first, min(first + window, len(self))), key=self._live_bytes.__getitem__)
            for first in range(0, len(self), window)
        ]
        categories = sorted({name for i in kept for name in self._by_category[i]})
        return {
            "op_index": [self._op_index[i] for i in kept],
            "phase": [self._phase[i] for i in kept],
            "live_bytes": [self._live_bytes[i] for i in kept],
            "by_category_bytes": {
                name: [self._by_category[i].get(name, 0) for i in kept] for name in categories
            },
        }
