"""The error of a configuration that cannot work."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the field, the value and the fix."""

    def __init__(self, name: str, value: Any, problem: str, fix: str):
        super().__init__(f"{name}={value!r}: {problem}. Fix: {fix}")
