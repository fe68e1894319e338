"""How a run tells its supervisor where it is: events as JSON lines on a pipe.

Finished record sections travel the same way, so a run that dies in its timing pass keeps the
training and the memory it had already measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


class Progress:
    """Reports of one run. This base class is silent, for use without a supervisor."""

    def phase(self, name: str) -> None:
        """A new phase starts: "model", "training", "memory", "timing", ..."""
        self.emit({"event": "phase", "name": name})

    def step(self, step: int, steps: int, **metrics: float | None) -> None:
        """Optimizer step `step` of `steps` (from 1) is done, e.g. with loss and grad_norm."""
        self.emit({"event": "step", "step": step, "steps": steps, "metrics": metrics})

    def message(self, text: str) -> None:
        """One line for a person, e.g. a probe of a maximum search."""
        self.emit({"event": "message", "text": text})

    def section(self, name: str, values: Any) -> None:
        """A finished section of the record ("training", "memory", ...); a later one replaces it."""
        self.emit({"event": "section", "name": name, "values": values})

    def emit(self, event: Event) -> None:
        """Send one event. The base class drops it."""


class PipeProgress(Progress):
    """Writes events to a file descriptor that the supervisor reads."""

    def __init__(self, descriptor: int):
        self._file = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def emit(self, event: Event) -> None:
        self._file.write(json.dumps(event, default=str) + "\n")
        self._file.flush()


class CallbackProgress(Progress):
    """Hands each event to a function, in this process."""

    def __init__(self, callback: Callable[[Event], None]):
        self._callback = callback

    def emit(self, event: Event) -> None:
        self._callback(event)
