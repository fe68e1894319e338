"""One folder per run, owned by one process: claims, resumption, and folders left by a dead process.

`<runs_dir>/<experiment>/<job>/`. A claim creates the folder exclusively and holds a file lock in
it for as long as the run lives, so that another process can tell a run in progress (waits for it)
from one whose process died (closes it with a record of status killed).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streambp.bench.config import RunConfig
from streambp.bench.records import RECORD_NAME, RecordError, RunRecord, utc_now, write_new

CONFIG_NAME = "config.yaml"
LOG_NAME = "run.log"
TIMELINE_NAME = "timeline.json"
_DRAFT_NAME = ".draft.json"  # the record as it would be if the process died now
_LOCK_NAME = ".lock"
_WAIT_S = 0.5


class RunsFolderError(ValueError):
    """The runs folder cannot be written (permission, full disk). The message says what to do."""

    def __init__(self, folder: Path, error: OSError, more: str = ""):
        reason = error.strerror or str(error)
        super().__init__(
            f"runs_dir: cannot write {folder} ({reason}). "
            f"Fix: free some space or allow writing there, or runs_dir=<another folder>{more}"
        )


@dataclass
class Claim:
    """A run folder that this process owns until `release`."""

    folder: Path
    lock: int  # file descriptor that holds the lock

    def store_draft(self, record: RunRecord) -> None:
        """Keep what is known of the run, for whoever finds the folder after this process died."""
        write_new(self.folder / _DRAFT_NAME, record.to_json())

    def release(self) -> None:
        """Give up the folder; its record has been written."""
        (self.folder / _DRAFT_NAME).unlink(missing_ok=True)
        (self.folder / _LOCK_NAME).unlink(missing_ok=True)
        os.close(self.lock)


def job_name(config: RunConfig, fingerprint: str) -> str:
    """Folder name of a run: what a person looks for, then the start of the fingerprint."""
    if config.experiment.kind != "training":
        return f"{config.experiment.kind}-{fingerprint[:8]}"
    size = "search" if config.searches else f"t{config.seq_len}-b{config.batch_size}"
    tuning = "" if config.tuning.name == "full" else f"-{config.tuning.name}"
    return f"{config.model.name}-{config.method.name}{tuning}-{size}-{fingerprint[:8]}"


def claim(
    experiment: Path,
    job: str,
    fingerprint: str,
    *,
    force: bool,
    on_message: Callable[[str], None] = lambda text: None,
) -> Claim | RunRecord:
    """A fresh folder for the run, or the finished record of an identical one.

    Folders of attempts are `<job>`, `<job>-2`, `<job>-3`, ... Waits while another process has the
    same run in progress, unless `force`. `on_message` gets what a person should know: that, and
    files that are no records and stay as they are.

    Raises:
        RunsFolderError: the folder cannot be written.
    """
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            on_message(text)

    try:
        experiment.mkdir(parents=True, exist_ok=True)
        while True:
            with _locked(experiment / _LOCK_NAME):
                found = _existing(experiment, job, fingerprint, tell)
                if isinstance(found, RunRecord) and not force:
                    return found
                if force or not isinstance(found, Path):
                    return _create(experiment, job)
            tell(f"waiting for the process that runs {found}")
            time.sleep(_WAIT_S)
    except OSError as error:
        raise RunsFolderError(experiment, error) from error


def check_writable(experiment: Path) -> None:
    """Create the folder of an experiment's runs.

    Raises:
        RunsFolderError: it cannot be created, or nothing in it.
    """
    try:
        experiment.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=experiment):
            pass
    except OSError as error:
        raise RunsFolderError(experiment, error) from error


def attempts(experiment: Path, job: str) -> list[Path]:
    """The folders of all attempts at a job, oldest first."""
    found = []
    for folder in experiment.glob(f"{job}*"):
        suffix = folder.name[len(job) :]
        if suffix == "" or (suffix.startswith("-") and suffix[1:].isdigit()):
            found.append((int(suffix[1:] or 1), folder))
    return [folder for _, folder in sorted(found)]


def close_abandoned(experiment: Path) -> list[Path]:
    """Give every folder of an experiment whose process died its record of status killed.

    Returns those folders; folders of runs in progress are left alone, and so are those of other
    machines, whose locks a shared file system may not show.
    """
    if not experiment.is_dir():
        return []
    with _locked(experiment / _LOCK_NAME):
        return [
            draft.parent
            for draft in sorted(experiment.glob(f"*/{_DRAFT_NAME}"))
            if not (draft.parent / RECORD_NAME).exists()
            and _of_this_machine(draft.parent)
            and _close_abandoned(draft.parent)
            and (draft.parent / RECORD_NAME).exists()
        ]


def _existing(
    experiment: Path, job: str, fingerprint: str, tell: Callable[[str], None]
) -> RunRecord | Path | None:
    """The finished record among the attempts, else the folder of one in progress, else None.

    `tell` gets the name of what is no record of this schema.
    """
    in_progress: Path | None = None
    for folder in attempts(experiment, job):
        if (folder / RECORD_NAME).exists():
            try:
                record = RunRecord.load(folder)
            except RecordError as error:  # foreign or damaged: left alone
                tell(f"skipped {error}")
                continue
            if record.finished and record.fingerprint == fingerprint:
                return record
        elif not _close_abandoned(folder):
            in_progress = folder
    return in_progress


def _of_this_machine(folder: Path) -> bool:
    try:
        host = (folder / _LOCK_NAME).read_text(encoding="utf-8")
    except OSError:
        return True
    return host in ("", socket.gethostname())


def _close_abandoned(folder: Path) -> bool:
    """Give the folder of a dead process its record; False if its process lives."""
    if not (folder / _LOCK_NAME).exists():
        return True
    lock = os.open(folder / _LOCK_NAME, os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        draft = folder / _DRAFT_NAME
        with contextlib.suppress(RecordError):  # no or foreign draft
            record = RunRecord.load(draft)
            record.finished_at = utc_now()
            record.write(folder)
        draft.unlink(missing_ok=True)
        (folder / _LOCK_NAME).unlink()
        return True
    finally:
        os.close(lock)


def _create(experiment: Path, job: str) -> Claim:
    number = 1
    while True:
        folder = experiment / (job if number == 1 else f"{job}-{number}")
        try:
            os.mkdir(folder)
            break
        except FileExistsError:
            number += 1
    lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, socket.gethostname().encode())
    return Claim(folder, lock)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created; waits for other processes."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
