"""Live tensor bytes by category, counted while a program runs on real or fake tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from streambp import labels
from streambp.sim.timeline import Timeline

#: Category of a tensor nobody registered, classified or labelled.
ACTIVATIONS = "activations"
#: Category of the bytes an op needs only while it runs.
WORKSPACES = "workspaces"

#: Under fake tensors a look at `tensor.device` is dispatched as an op.
_DEVICE_OF = torch.ops.prim.device.default

#: ``workspace(args, kwargs, out) -> bytes`` an op allocates and frees within its own call.
Workspace = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
#: ``classify(tensor) -> category`` for tensors nobody registered, or None to leave it.
Classify = Callable[[torch.Tensor], "str | None"]


class LiveTensor(NamedTuple):
    """One live storage as it is listed among the largest at a peak."""

    name: str
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str


class Event(NamedTuple):
    """A change of live bytes: `num_bytes` came, went (negative), or changed category (0)."""

    event_id: int  # of the storage or workspace
    num_bytes: int
    category: str
    op_index: int


@dataclass
class Block:
    """What happened from one assignment of `LiveTracker.phase` to the next."""

    phase: str
    first_op: int
    events: list[Event] = field(default_factory=list)


@dataclass
class Peak:
    """The highest live bytes seen in one phase, and what was alive then."""

    live_bytes: int = 0
    by_category: dict[str, int] = field(default_factory=dict)
    largest: list[LiveTensor] = field(default_factory=list)
    op: str = ""


class _Record:
    """What is known of one live storage. Its bytes are rounded as the allocator would."""

    __slots__ = ("category", "dtype", "event_id", "name", "num_bytes", "shape")

    def __init__(
        self, name: str, num_bytes: int, tensor: torch.Tensor, category: str, event_id: int
    ):
        self.name = name
        self.num_bytes = num_bytes
        self.shape = tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.category = category
        self.event_id = event_id


class LiveTracker(TorchDispatchMode):
    """Counts the bytes of every storage created or registered while the mode is on, until it dies.

    A storage counts once however many views it has. It is categorised by `register`, by the labels
    that the library gives its own tensors, by `classify`, and otherwise as "activations".

    Args:
        round_to: sizes are rounded up to this many bytes (512: the CUDA allocator; 1: not at all).
        workspaces: op -> function giving the bytes the op needs during its call; a peak may consist
            of the live bytes plus such a workspace.
        classify: names the category of a tensor that no one else has named.
        record_events: keep every `Event`, for replaying an allocator, in `blocks`.
        timeline: keep the live bytes by category after every change.
        num_largest: how many tensors `peak_largest` lists.

    `phase` may be assigned at any time; peaks are kept per phase in `peaks`.
    """

    def __init__(
        self,
        *,
        round_to: int = 1,
        workspaces: Mapping[Any, Workspace] | None = None,
        classify: Classify | None = None,
        record_events: bool = False,
        timeline: bool = False,
        num_largest: int = 10,
    ):
        super().__init__()
        if round_to < 1:
            raise ValueError(f"round_to={round_to}: must be at least 1 byte")
        self.live_bytes = 0
        self.peaks: dict[str, Peak] = {}
        self.timeline: Timeline | None = Timeline() if timeline else None
        self.num_ops = 0
        self._round_to = round_to
        self._workspaces = workspaces or {}
        self._classify = classify
        self._num_largest = num_largest
        self._records: dict[int, _Record] = {}
        self._by_category: dict[str, int] = {}
        self._next_event_id = 0
        self._op = ""
        self._phase = "start"
        self.blocks: list[Block] | None = [Block(self._phase, 0)] if record_events else None
        self._peak = self.peaks.setdefault(self._phase, Peak())
        self._stale = False  # the current phase's peak has grown since its snapshot was taken
        self._stack: list[contextlib.ExitStack] = []

    # -- switching on and off ------------------------------------------------------------------

    def __enter__(self) -> Self:
        stack = contextlib.ExitStack()
        stack.enter_context(labels.observe(self.register))
        self._stack.append(stack)
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._stack.pop().close()

    # -- what is read --------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Name of the part of the step that runs now."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        if self.blocks is not None:
            self.blocks.append(Block(name, self.num_ops))
        if name == self._phase:
            return
        self._snapshot()
        self._phase = name
        self._peak = self.peaks.setdefault(name, Peak())
        self._reach(self.live_bytes)

    @property
    def events(self) -> list[Event]:
        """All events so far, in order. Only with `record_events`."""
        assert self.blocks is not None
        return [event for block in self.blocks for event in block.events]

    @property
    def peak_phase(self) -> str:
        """The phase in which the highest live bytes occurred (the first of equals)."""
        return max(self.peaks, key=lambda name: self.peaks[name].live_bytes)

    @property
    def peak(self) -> Peak:
        """The highest peak of all phases since the last `reset_peak`."""
        self._snapshot()
        return self.peaks[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes, workspaces included, since the last `reset_peak`."""
        return max(peak.live_bytes for peak in self.peaks.values())

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes by category at the peak; they sum to `peak_bytes`."""
        return dict(self.peak.by_category)

    @property
    def peak_largest(self) -> list[LiveTensor]:
        """The largest live tensors at the peak, largest first."""
        return list(self.peak.largest)

    @property
    def peak_op(self) -> str:
        """The op during which the peak was reached."""
        return self.peak.op

    def live_by_category(self) -> dict[str, int]:
        """Bytes by category now."""
        return {category: num for category, num in self._by_category.items() if num}

    def reset_peak(self) -> None:
        """Forget every peak: the peak is then what is alive now."""
        self.peaks.clear()
        self._peak = self.peaks.setdefault(self._phase, Peak())
        self._stale = False
        self._reach(self.live_bytes)

    # -- what is counted -----------------------------------------------------------------------

    def register(self, tensor: torch.Tensor, category: str, name: str | None = None) -> None:
        """Count the storage of `tensor` under `category`, from now on if it was not counted yet."""
        if not _has_storage(tensor):
            return
        record = self._records.get(tensor.untyped_storage()._cdata)
        if record is None:
            self._add(tensor, category, name or category)
            return
        self._snapshot()
        if record.category != category:
            self._by_category[record.category] -= record.num_bytes
            self._by_category[category] = self._by_category.get(category, 0) + record.num_bytes
            record.category = category
            self._record_change(record.event_id, 0, category)
        record.name = name or category
        if self._peak.live_bytes == self.live_bytes:
            self._stale = True  # the peak of this very moment is better described by the new name

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:
            return func(*args, **kwargs)
        self._op = func.__name__
        self.num_ops += 1
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _has_storage(leaf):
                self._see(leaf)
        workspace = self._workspaces.get(func)
        if workspace is not None:
            self._use_workspace(workspace(args, kwargs, out))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        record = self._records.get(storage._cdata)
        if record is None:
            category = self._classify(tensor) if self._classify is not None else None
            self._add(tensor, category or ACTIVATIONS, self._op)
        elif record.num_bytes != self._rounded(storage.nbytes()):  # resized in place
            self._remove_bytes(record)
            record.num_bytes = self._rounded(storage.nbytes())
            self._add_bytes(record)

    def _add(self, tensor: torch.Tensor, category: str, name: str) -> None:
        storage = tensor.untyped_storage()
        num_bytes = self._rounded(storage.nbytes())
        if num_bytes == 0:
            return
        key = storage._cdata
        record = _Record(name, num_bytes, tensor, category, self._new_event_id())
        self._records[key] = record
        self._add_bytes(record)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        record = self._records[key]
        self._remove_bytes(record)
        del self._records[key]

    def _add_bytes(self, record: _Record) -> None:
        self.live_bytes += record.num_bytes
        self._by_category[record.category] = (
            self._by_category.get(record.category, 0) + record.num_bytes
        )
        self._record_change(record.event_id, record.num_bytes, record.category)
        self._reach(self.live_bytes)

    def _remove_bytes(self, record: _Record) -> None:
        self._snapshot()
        self.live_bytes -= record.num_bytes
        self._by_category[record.category] -= record.num_bytes
        self._record_change(record.event_id, -record.num_bytes, record.category)

    def _use_workspace(self, num_bytes: int) -> None:
        num_bytes = self._rounded(num_bytes)
        if num_bytes <= 0:
            return
        event_id = self._new_event_id()
        self._snapshot()
        self._by_category[WORKSPACES] = self._by_category.get(WORKSPACES, 0) + num_bytes
        self._record_change(event_id, num_bytes, WORKSPACES, extra_bytes=num_bytes)
        self._reach(self.live_bytes + num_bytes)
        self._snapshot()
        self._by_category[WORKSPACES] -= num_bytes
        self._record_change(event_id, -num_bytes, WORKSPACES)

    def _record_change(
        self, event_id: int, num_bytes: int, category: str, extra_bytes: int = 0
    ) -> None:
        if self.blocks is not None:
            self.blocks[-1].events.append(Event(event_id, num_bytes, category, self.num_ops))
        if self.timeline is not None and num_bytes:
            self.timeline.append(
                self.num_ops, self._phase, self.live_bytes + extra_bytes, self._by_category
            )

    def _reach(self, live_bytes: int) -> None:
        if live_bytes > self._peak.live_bytes:
            self._peak.live_bytes = live_bytes
            self._peak.op = self._op
            self._stale = True

    def _snapshot(self) -> None:
        """Describe the peak while everything that made it is still alive (before anything dies)."""
        if not self._stale:
            return
        self._stale = False
        self._peak.by_category = self.live_by_category()
        largest = sorted(self._records.values(), key=lambda record: -record.num_bytes)
        self._peak.largest = [
            LiveTensor(r.name, r.num_bytes, r.shape, r.dtype, r.category)
            for r in largest[: self._num_largest]
        ]

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._round_to) * self._round_to

    def _new_event_id(self) -> int:
        self._next_event_id += 1
        return self._next_event_id


def register_model(tracker: LiveTracker, model: torch.nn.Module) -> contextlib.ExitStack:
    """Count a model's weights, buffers and resident gradients, and its gradients as they appear.

    Returns a context that removes the hooks put on parameters without a gradient. (Those with one
    get none: their gradient stays the same tensor, and a hook could change what a method does.)
    """
    stack = contextlib.ExitStack()
    for name, buffer in model.named_buffers():
        tracker.register(buffer, "weights", name)
    for name, parameter in model.named_parameters():
        tracker.register(parameter, "weights", name)
        if parameter.grad is not None:
            tracker.register(parameter.grad, "gradients", name)
        elif parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(_gradient_hook(tracker, name))
            stack.callback(hook.remove)
    return stack


def _gradient_hook(tracker: LiveTracker, name: str) -> Callable[[torch.Tensor], None]:
    def label_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        tracker.register(parameter.grad, "gradients", name)

    return label_gradient


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided
