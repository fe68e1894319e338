"""Checks of single values of a configuration: each raises `ConfigError` with field and fix."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from streambp.bench.errors import ConfigError

MAX_INT = 2**63 - 1  # what torch takes as a size or a seed


def check_int(name: str, value: Any, *, at_least: int, fix: str) -> None:
    """Raise unless `value` is a whole number from `at_least` to `MAX_INT`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(name, value, f"must be a whole number, not {type(value).__name__}", fix)
    if value < at_least:
        raise ConfigError(name, value, f"must be at least {at_least}", fix)
    if value > MAX_INT:
        raise ConfigError(name, value, f"must be at most {MAX_INT}", fix)


def check_optional_int(name: str, value: Any, *, at_least: int, fix: str) -> None:
    """`check_int`, or None."""
    if value is not None:
        check_int(name, value, at_least=at_least, fix=f"{fix}, or {name}=null")


def check_number(
    name: str, value: Any, *, fix: str, above: float | None = None, at_least: float | None = None
) -> None:
    """Raise unless `value` is a finite number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(name, value, f"must be a number, not {type(value).__name__}", fix)
    if abs(value) > sys.float_info.max:
        raise ConfigError(name, value, "must be finite", fix)
    if above is not None and not value > above:
        raise ConfigError(name, value, f"must be greater than {above:g}", fix)
    if at_least is not None and not value >= at_least:
        raise ConfigError(name, value, f"must be at least {at_least:g}", fix)


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(name, value, "must be true or false", f"{name}=true or {name}=false")


def check_mapping(name: str, value: Any) -> None:
    """Raise unless `value` is a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "must be a group of settings", f"+{name}.<setting>=<value>")


def check_text(name: str, value: Any, *, fix: str) -> None:
    """Raise unless `value` is text, not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(name, value, f"must be text, not {type(value).__name__}", fix)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`; the fix names the one it most likely misspells."""
    choices = tuple(choices)
    if value not in choices:
        near = closest(str(value), choices)
        fix = f"did you mean {name}={near}?" if near else f"{name}={choices[0]}"
        raise ConfigError(name, value, f"must be one of {', '.join(choices)}", fix)


def check_name(name: str, value: Any) -> None:
    """Raise unless `value` can be the name of a folder."""
    if not isinstance(value, str) or not value or "/" in value or value.startswith("."):
        raise ConfigError(name, value, "must be a plain word", f"{name}=my_name")


def check_path(name: str, value: Any, *, kind: str = "file or folder") -> None:
    """Raise unless `value` is None or an existing path of that kind."""
    if value is None:
        return
    check_text(name, value, fix=f"{name}=<path of an existing {kind}>")
    path = Path(value).expanduser()
    exists = {"file": path.is_file, "folder": path.is_dir}.get(kind, path.exists)()
    if not exists:
        problem = f"no such {kind} (looked at {path.absolute()})"
        raise ConfigError(name, value, problem, f"{name}=<path of an existing {kind}>")


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The entry of `choices` that `word` most likely misspells, or None."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return matches[0] if matches else None
