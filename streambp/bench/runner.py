"""One run from config to record: claim a folder, run the worker, write the record."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streambp.bench import environment, folders, preflight
from streambp.bench.config import RunConfig
from streambp.bench.folders import (
    CONFIG_NAME,
    TIMELINE_NAME,
    Claim,
    RunsFolderError,
    claim,
    job_name,
)
from streambp.bench.progress import Event
from streambp.bench.records import RECORD_NAME, RunRecord, utc_now, write_new
from streambp.bench.supervise import Ending, supervise
from streambp.bench.tracking import tracker_for

Listener = Callable[[Event], None]


@dataclass(frozen=True)
class JobOutcome:
    """A job's record, and whether it had been there before (`skipped`).

    `unsent`: it had, so W&B, which was to follow the run, gets nothing of it now.
    """

    record: RunRecord
    skipped: bool
    wall_time_s: float
    unsent: bool = False

    @property
    def folder(self) -> Path:
        assert self.record.path is not None
        return self.record.path.parent


def run_job(
    config: RunConfig,
    *,
    overrides: Sequence[str] = (),
    on_event: Listener = lambda event: None,
    lone: bool = False,
) -> JobOutcome:
    """Do one run, or find the finished record of an identical one (unless `config.force`).

    `lone`: nobody runs many of these, so what is cheap and large is stored as well.

    Whatever happens to the worker becomes the record's status; Ctrl-C too, before it goes on up.

    Raises:
        ConfigError: this machine cannot do the run.
        RunsFolderError: the runs folder cannot be written.
    """
    started = time.monotonic()
    config, notes = preflight.resolve(config, lone=lone)
    fingerprint = environment.fingerprint(config.to_dict())
    job = job_name(config, fingerprint)
    home = Path(config.runs_dir) / config.experiment.name
    if lone:  # a sweep has done so for all its jobs
        close_abandoned(home, on_event)
    claimed = claim(
        home,
        job,
        fingerprint,
        force=config.force,
        on_message=lambda text: on_event({"event": "warning", "text": text}),
    )
    if isinstance(claimed, RunRecord):
        unsent = config.tracking.name != "none"
        return JobOutcome(claimed, skipped=True, wall_time_s=_since(started), unsent=unsent)
    record = RunRecord(
        run_id=uuid.uuid4().hex[:12],
        fingerprint=fingerprint,
        experiment=config.experiment.name,
        job=claimed.folder.name,
        status="killed",
        status_detail="the supervising process ended before the run did",
        started_at=utc_now(),
        finished_at=utc_now(),
        config=config.to_dict(),
        overrides=list(overrides),
        versions=environment.versions(),
        hardware=environment.hardware(),
        git=environment.git_state(),
        notes=notes,
    )
    _execute(config, claimed, record, on_event)
    return JobOutcome(record, skipped=False, wall_time_s=_since(started))


def _since(started: float) -> float:
    return time.monotonic() - started


def close_abandoned(home: Path, on_event: Listener) -> None:
    """Record attempts of an experiment whose supervising process died as killed, and say so.

    Raises:
        RunsFolderError: the runs folder cannot be written.
    """
    try:
        for folder in folders.close_abandoned(home):
            text = (
                f"an earlier attempt died without a record; it is now recorded as killed: {folder}"
            )
            on_event({"event": "warning", "text": text})
    except OSError as error:
        raise RunsFolderError(home, error) from error


def _execute(config: RunConfig, claimed: Claim, record: RunRecord, on_event: Listener) -> None:
    tracker = tracker_for(config.tracking, claimed.folder)
    ending = Ending()

    def listen(event: Event) -> None:
        tracker.event(event)
        on_event(event)

    try:
        claimed.store_draft(record)
        text = yaml.safe_dump(record.config, sort_keys=False)
        write_new(claimed.folder / CONFIG_NAME, text)
        tracker.start(record)
        try:
            supervise(claimed.folder, ending, timeout_s=config.timeout_s, on_event=listen)
        finally:
            _fill(record, ending, claimed.folder)
            _store(record, claimed)
            tracker.finish(record)
    except OSError as error:
        raise RunsFolderError(claimed.folder, error) from error


def _store(record: RunRecord, claimed: Claim) -> None:
    """Write the record; where its folder takes none (a full disk), next to the temporary files.

    Raises:
        RunsFolderError: it could not be written there; says where it is instead.
    """
    try:
        record.write(claimed.folder)
    except OSError as error:
        os.close(claimed.lock)  # the folder is then that of a dead process
        rescued = Path(tempfile.gettempdir()) / f"streambp-{claimed.folder.name}.json"
        text = f". The run was done; its record is lost ({error.strerror or error})"
        with contextlib.suppress(OSError):
            write_new(rescued, record.to_json())
            text = f". The run was done: cp {rescued} {claimed.folder / RECORD_NAME} keeps it"
        raise RunsFolderError(claimed.folder, error, text) from error
    claimed.release()


def _fill(record: RunRecord, ending: Ending, folder: Path) -> None:
    """Put the worker's sections and its ending into the record; the timeline into its own file."""
    sections: dict[str, Any] = dict(ending.sections)
    timeline = sections.pop("timeline", None)
    record.notes = [*record.notes, *sections.pop("notes", [])]
    if timeline is not None:
        try:
            write_new(folder / TIMELINE_NAME, json.dumps(timeline))
        except OSError as error:  # the record is small and matters more
            record.notes.append(f"the timeline could not be stored: {error.strerror or error}")
    record.provenance = {**record.provenance, **sections.pop("provenance", {})}
    record.hardware = {**record.hardware, **sections.pop("hardware", {})}
    for name, values in sections.items():
        assert name in ("training", "memory", "time", "flops", "search", "benchmark"), name
        setattr(record, name, values)
    record.status, record.status_detail = ending.status, ending.detail
    record.finished_at = utc_now()
