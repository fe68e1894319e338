"""What a run depended on besides its config: package versions, hardware, source code.

Nothing here imports torch, so the process that supervises runs stays light.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from streambp.bench.checkpoints import config_of_checkpoint
from streambp.bench.errors import ConfigError

PACKAGES = ("streambp", "torch", "transformers", "peft", "numpy", "hydra-core", "wandb", "triton")
PACKAGE_ROOT = Path(__file__).resolve().parents[1]

# Settings that decide where a run's results go or whether it starts, not what they are.
LAUNCH_KEYS = ("tracking", "force", "runs_dir", "timeout_s")
# Files whose change cannot change a number in a record.
_PRESENTATION = (
    "bench/answer.py",
    "bench/cli.py",
    "bench/dashboard.py",
    "bench/display.py",
    "bench/paper.py",
    "bench/quickplot.py",
    "bench/sweep.py",
    "bench/tables.py",
    "bench/tracking/",
)


_WHOLE_FILE_BYTES = 64 << 20  # above it, reading all of a file would hold up the start of a run
_END_BYTES = 1 << 20


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that matters; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


@functools.lru_cache(maxsize=1)
def git_state() -> dict[str, Any]:
    """{"commit": hash, "dirty": bool} of the source tree; None values outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE_ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def hardware() -> dict[str, Any]:
    """The machine: CPU, cores this process may use, memory in bytes, GPUs by NVML (or a reason)."""
    gpus, reason = _gpus()
    return {
        "platform": platform.platform(),
        "cpu_model": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "gpus_unavailable": reason,
    }


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> tuple[list[dict[str, Any]] | None, str | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return None, f"NVML: {error}"
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                {
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                }
            )
        return found, None
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


@functools.lru_cache(maxsize=1)
def code_version() -> str:
    """Hash of the sources behind a run's numbers and of the torch and transformers versions."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE_ROOT.rglob("*.py")):
        name = path.relative_to(PACKAGE_ROOT).as_posix()
        if not name.startswith(_PRESENTATION):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in ("torch", "transformers"):
        digest.update(f"{package}={versions()[package]}\0".encode())
    return digest.hexdigest()[:16]


def fingerprint(config: dict[str, Any]) -> str:
    """Equal for two runs exactly when their results are expected to be: config and code, hashed.

    Local inputs (checkpoint, text, tokenizer) count with the names and contents of their files.
    Left out: `LAUNCH_KEYS` and the experiment's description.

    Raises:
        ConfigError: a local input cannot be read.
    """
    relevant = {key: value for key, value in config.items() if key not in LAUNCH_KEYS}
    experiment = dict(relevant.get("experiment") or {})
    experiment.pop("description", None)
    relevant["experiment"] = experiment
    relevant["inputs"] = [
        _contents(f"{group}.{key}", path)
        for group, key in (("model", "checkpoint"), ("data", "path"), ("data", "tokenizer"))
        if (path := (config.get(group) or {}).get(key))
    ]
    text = json.dumps(relevant, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(f"{code_version()}\n{text}".encode()).hexdigest()


def _contents(setting: str, path: str) -> list[tuple[str, str]]:
    """(name, hash) of a file, or of every file in a folder or in the folder of a cached model."""
    root = Path(path).expanduser()
    try:
        if setting == "model.checkpoint":
            root = config_of_checkpoint(path).parent
        files = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file()]
        return sorted((str(file.relative_to(root)), _hash(file)) for file in files)
    except OSError as error:
        reason = f"{error.filename or root} can't be read ({error.strerror})"
        raise ConfigError(
            setting, path, reason, f"allow reading it, or another {setting}"
        ) from None


def _hash(file: Path) -> str:
    known = file.stat()
    return _hash_of(str(file.absolute()), known.st_size, known.st_mtime_ns, known.st_ino)


@functools.lru_cache(maxsize=4096)  # the jobs of a sweep share their inputs
def _hash_of(path: str, size: int, mtime_ns: int, inode: int) -> str:
    """Of all bytes; of a large file, its head and tail with its size and time of change."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            while block := file.read(_END_BYTES):
                digest.update(block)
        else:
            digest.update(f"{size} {mtime_ns} ".encode() + file.read(_END_BYTES))
            file.seek(-_END_BYTES, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()
