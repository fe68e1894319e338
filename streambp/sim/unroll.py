"""What a deep model allocates and frees, from a run of a shallower one.

Between the first and the last layers every pattern of layers does the same, so the blocks of two
neighbouring patterns tell what those do that were left out. A storage is known by the block that
allocates it and its place there; a block of a layer refers to its neighbours' by their distance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streambp.sim.tracker import Block, Event

FORWARD, BACKWARD = "forward/layer", "backward/layer"


class _Place(NamedTuple):
    """A block: the stage of a layer, or (layer -1) any other, `stage` being its phase."""

    stage: str
    layer: int


class _Step(NamedTuple):
    """An event, and the storage it is about: the `ordinal`-th that the block `home` allocates."""

    event: Event
    home: _Place
    ordinal: int


class _NotPeriodicError(Exception):
    """The middle layers do not all do the same."""


def unrolled(
    blocks: Sequence[Block], resident: Sequence[Event], *, num_layers: int, period: int
) -> list[Block] | None:
    """The blocks of a model of `num_layers`, from those of one with fewer layers.

    blocks: of a pass over at least four periods of layers. resident: events of the deep model
    before its pass. None where the layers in the middle differ in what they do.
    """
    try:
        return list(_Unrolling(blocks, resident, num_layers, period).blocks())
    except _NotPeriodicError:
        return None


class _Unrolling:
    """New patterns of layers go between the second and the third one of those that were run."""

    def __init__(
        self, blocks: Sequence[Block], resident: Sequence[Event], num_layers: int, period: int
    ):
        self._period = period
        self._cut = 2 * period
        self._start, *rest = blocks
        self._resident = resident
        self._ids = itertools.count(max((event.event_id for event in resident), default=0) + 1)
        self._id_of: dict[tuple[_Place, int], int] = {}
        self._blocks: dict[_Place, Block] = {}
        self._steps: dict[_Place, list[_Step]] = {}
        self._num_ops: dict[_Place, int] = {}
        run = self._read(rest)
        self._num_new = num_layers - run
        if self._num_new < 0 or self._num_new % period or run < 4 * period:
            raise ValueError(f"{run} layers of period {period} can't be unrolled to {num_layers}")

    def _read(self, blocks: Sequence[Block]) -> int:
        """Index the blocks by place, and their storages; returns the number of layers."""
        counts = Counter(block.phase.rpartition(" ")[0] for block in blocks)
        num_layers = counts[FORWARD]
        if counts[BACKWARD] != num_layers:
            raise _NotPeriodicError
        forward, backward = iter(range(num_layers)), iter(range(num_layers - 1, -1, -1))
        homes: dict[int, tuple[_Place, int]] = {}
        for index, block in enumerate(blocks):
            stage = block.phase.rpartition(" ")[0]
            if stage == FORWARD:
                place = _Place(stage, next(forward))
            elif stage == BACKWARD:
                place = _Place(stage, next(backward))
            else:
                place = _Place(f"{block.phase}#{index}", -1)
            ordinals = itertools.count()
            steps = []
            for event in block.events:
                if event.num_bytes > 0:
                    homes[event.event_id] = (place, next(ordinals))
                if event.event_id not in homes:  # of before the pass
                    raise _NotPeriodicError
                steps.append(_Step(event, *homes[event.event_id]))
            following = blocks[index + 1].first_op if index + 1 < len(blocks) else block.first_op
            self._blocks[place], self._steps[place] = block, steps
            self._num_ops[place] = max(following - block.first_op, 0)
        return num_layers

    def blocks(self) -> Iterator[Block]:
        """The blocks of the deep model."""
        yield Block(self._start.phase, self._start.first_op, list(self._resident))
        op = next(iter(self._blocks.values())).first_op
        if self._resident:
            op += self._resident[-1].op_index - self._start.events[-1].op_index
        for source, layer, steps in self._in_order():
            block = self._blocks[source]
            events = self._events(source, layer, steps, op - block.first_op)
            yield Block(block.phase, op, events)
            op += self._num_ops[source]

    def _in_order(self) -> Iterator[tuple[_Place, int, Sequence[_Step]]]:
        """(place of the block to take, its layer in the deep model, its steps)."""
        new = range(self._cut, self._cut + self._num_new)
        for place, steps in self._steps.items():
            yield place, self._moved(place.layer), steps
            if place == (FORWARD, self._cut - 1):
                yield from self._middle(FORWARD, new)
            elif place == (BACKWARD, self._cut):
                yield from self._middle(BACKWARD, reversed(new))

    def _middle(
        self, stage: str, layers: Sequence[int] | Iterator[int]
    ) -> Iterator[tuple[_Place, int, Sequence[_Step]]]:
        period = self._period
        merged = [
            _merged(
                self._steps[_Place(stage, period + i)],
                self._steps[_Place(stage, 2 * period + i)],
                (period + i, 2 * period + i),
            )
            for i in range(period)
        ]
        for layer in layers:
            i = (layer - self._cut) % period
            yield _Place(stage, period + i), layer, merged[i]

    def _moved(self, layer: int) -> int:
        """Where a layer that was run is in the deep model."""
        return layer if layer < self._cut else layer + self._num_new

    def _events(
        self, source: _Place, layer: int, steps: Sequence[_Step], op_shift: int
    ) -> list[Event]:
        events = []
        for event, home, ordinal in steps:
            key = (self._new_home(source, layer, home), ordinal)
            if event.num_bytes > 0:
                self._id_of[key] = next(self._ids)
            elif key not in self._id_of:
                raise _NotPeriodicError
            events.append(
                event._replace(event_id=self._id_of[key], op_index=event.op_index + op_shift)
            )
        return events

    def _new_home(self, source: _Place, layer: int, home: _Place) -> _Place:
        """Neighbours stay neighbours; other layers are found where they have moved."""
        if home.layer < 0:
            return home
        distance = home.layer - source.layer
        if source.layer >= 0 and abs(distance) <= self._period:
            return home._replace(layer=layer + distance)
        return home._replace(layer=self._moved(home.layer))


def _merged(
    earlier: Sequence[_Step], later: Sequence[_Step], layers: tuple[int, int]
) -> list[_Step]:
    """The steps of a layer with middle layers on both sides, as seen from the earlier of the two.

    The later of the two that were run has a middle layer before it, the earlier one behind it.
    """
    if len(earlier) != len(later):
        raise _NotPeriodicError
    merged = []
    for one, other in zip(earlier, later, strict=True):
        if one.event[1:3] != other.event[1:3] or one.home.stage != other.home.stage:
            raise _NotPeriodicError
        if one.home.layer < 0:
            if one != other._replace(event=one.event):
                raise _NotPeriodicError
            merged.append(one)
            continue
        distance = one.home.layer - layers[0]
        if distance != other.home.layer - layers[1] or abs(distance) > layers[1] - layers[0]:
            raise _NotPeriodicError
        merged.append(one._replace(ordinal=other.ordinal) if distance < 0 else one)
    return merged
