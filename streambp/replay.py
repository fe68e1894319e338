"""What a recomputation must repeat: random numbers and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

RandomState = tuple[torch.Tensor, torch.Tensor | None]


class RandomStates:
    """The random state before each chunk of a forward pass, kept only if a chunk drew from it.

    Copies of an unchanged state are shared, so a layer without dropout costs two small
    comparisons per chunk and keeps nothing.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._active = not isinstance(x, FakeTensor)  # nothing random happens without values
        self._device = x.device
        self._states: list[RandomState] = []

    def before_chunk(self) -> None:
        """Note the state the next chunk starts from."""
        if not self._active:
            return
        state = self._read()
        if self._states and _same(self._states[-1], state):
            state = self._states[-1]
        self._states.append(state)

    def finish(self) -> RandomStates | None:
        """Self after the last chunk, or `None` if no chunk drew a random number."""
        if not self._active or not self._states:
            return None
        return None if _same(self._states[0], self._read()) else self

    def restore(self, index: int) -> None:
        """Put the generators where chunk `index` of the forward pass found them."""
        cpu, device = self._states[index]
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device, self._device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Leave the generators as they were when the block ends."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            yield

    def _read(self) -> RandomState:
        on_gpu = self._device.type == "cuda"
        return (
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self._device) if on_gpu else None,
        )


def _same(a: RandomState, b: RandomState) -> bool:
    if not torch.equal(a[0], b[0]):
        return False
    return a[1] is None or b[1] is None or torch.equal(a[1], b[1])


def autocast_state(device_type: str) -> dict[str, Any]:
    """Arguments for `torch.autocast` that bring the current state back."""
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": False,
    }


def autocast(state: dict[str, Any]) -> AbstractContextManager[Any]:
    """Re-enter an autocast state captured by `autocast_state`."""
    return torch.autocast(**state)
