"""Runs a worker process to its end and says how it ended, whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streambp.bench.environment import PACKAGE_ROOT
from streambp.bench.folders import LOG_NAME
from streambp.bench.progress import Event
from streambp.bench.worker import says_out_of_memory

WORKER = ("-m", "streambp.bench.worker")
_POLL_S = 0.2
_LOG_TAIL_BYTES = 4000
# Signals that someone sends; any other one (SIGSEGV, SIGABRT, ...) is a crash.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class Ending:
    """How a worker ended, and every record section it had finished."""

    status: str = "error"
    detail: str | None = None
    sections: dict[str, Any] = field(default_factory=dict)


def supervise(
    folder: Path,
    ending: Ending,
    *,
    timeout_s: float | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> None:
    """Run the worker on a folder that holds its config.yaml; fill `ending`.

    The worker's output and its messages go to run.log. `ending` is filled as events arrive, so
    that after an exception (Ctrl-C) it still has the finished sections; the worker is then ended
    first.
    """
    reader, writer = os.pipe()
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT.parent), os.environ.get("PYTHONPATH")]))
    with open(folder / LOG_NAME, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *WORKER, str(folder), str(writer)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
    os.close(writer)
    outcome: Event | None = None
    timed_out = False
    try:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for event in _events(reader, process, deadline):
            if event["event"] == "section":
                ending.sections[event["name"]] = event["values"]
            elif event["event"] == "outcome":
                outcome = event
                ending.sections.update(event["sections"])
            else:
                if event["event"] == "message":
                    _append(folder / LOG_NAME, event["text"])
                on_event(event)
        timed_out = process.poll() is None and outcome is None
    except BaseException:
        ending.status, ending.detail = "killed", "the run was interrupted"
        raise
    finally:
        os.close(reader)
        _end(process)
    if outcome is not None:
        ending.status, ending.detail = outcome["status"], outcome["status_detail"]
    elif timed_out:
        ending.status, ending.detail = "killed", f"ran longer than timeout_s={timeout_s:g}"
    else:
        ending.status, ending.detail = _without_outcome(process.returncode, folder / LOG_NAME)


def _events(
    reader: int, process: subprocess.Popen[bytes], deadline: float | None
) -> Iterator[Event]:
    """Events until the worker ends or the deadline passes (the process is then still alive)."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None  # before reading, so that nothing is missed
            if selector.select(0 if ended else _POLL_S):
                data = os.read(reader, 1 << 16)
                if data:
                    *lines, buffer = (buffer + data).split(b"\n")
                    yield from map(json.loads, lines)
                    continue
                process.wait()
                return
            if ended or (deadline is not None and time.monotonic() > deadline):
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that the worker and what it started are gone."""
    if process.stdin:
        process.stdin.close()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _without_outcome(returncode: int, log: Path) -> tuple[str, str]:
    """(status, detail) of a worker that ended without saying how."""
    tail = _tail(log)
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "no output")
    if returncode >= 0:
        status = "oom" if says_out_of_memory(tail) else "error"
        return status, f"the worker left with exit code {returncode}: {last}"
    name = signal.Signals(-returncode).name
    if -returncode == signal.SIGKILL:
        return "killed", "SIGKILL (by someone, or by the kernel for lack of host memory)"
    if -returncode in _SENT:
        return "killed", name
    return "oom" if says_out_of_memory(tail) else "error", f"the worker died of {name}: {last}"


def end_of_log(folder: Path) -> str:
    """The last lines of the log of a run's folder."""
    return _tail(folder / LOG_NAME, 5 * _LOG_TAIL_BYTES)


def _append(log: Path, text: str) -> None:
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8", errors="replace") as file:
        file.write(f"{text}\n")


def _tail(log: Path, num_bytes: int = _LOG_TAIL_BYTES) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - num_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
