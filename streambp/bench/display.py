"""What a person sees in the terminal while runs go on and when they are done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from streambp.bench.answer import answer_heading, answer_lines, answer_table, has_answer
from streambp.bench.config import RunConfig
from streambp.bench.folders import LOG_NAME, TIMELINE_NAME
from streambp.bench.progress import Event
from streambp.bench.records import RunRecord
from streambp.bench.tables import (
    gib,
    has_numbers,
    heading,
    median_s,
    peak_bytes,
    record_table,
    remarks,
    seconds,
)

if TYPE_CHECKING:
    from streambp.bench.runner import JobOutcome

_STYLES = {"ok": "green", "oom": "yellow", "error": "red", "killed": "red"}
_PLAIN_WIDTH = 120


class Display:
    """The terminal of one job (`job`: its number and the sweep's total) or of a whole sweep."""

    def __init__(self, job: tuple[int, int] | None):
        self._job = job
        terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, width=None if terminal else _PLAIN_WIDTH)

    @property
    def _prefix(self) -> str:
        return f"job {self._job[0]}/{self._job[1]}  " if self._job else ""

    def sweep_starts(self, jobs: int) -> None:
        self._console.print(f"{jobs} job{'s' if jobs != 1 else ''}", markup=False)

    @contextmanager
    def running(
        self, config: RunConfig, overrides: Sequence[str]
    ) -> Iterator[Callable[[Event], None]]:
        """A status line that follows a run's events; plain lines where there is no terminal."""
        label = self._prefix + (" ".join(overrides) or f"{config.model.name} {config.method.name}")
        if not self._console.is_terminal:
            self._console.print(label, markup=False, soft_wrap=True)
            yield self.event
            return
        with self._console.status(escape(label)) as status:

            def on_event(event: Event) -> None:
                self.event(event)
                status.update(f"{escape(label)}  [cyan]{escape(_where(event))}[/cyan]")

            yield on_event

    def event(self, event: Event) -> None:
        """A line for an event. A lone run prints what it does; among several that would bury the
        jobs, not warnings."""
        lone = self._job is None or self._job[1] == 1
        if event["event"] == "warning" or (event["event"] != "phase" and lone):
            self._console.print(f"  {_where(event)}", markup=False, soft_wrap=True)

    def ended(self, outcome: JobOutcome) -> None:
        """One line: status, what it took, or why it failed and where the log is."""
        record = outcome.record
        self._console.print(f"{self._prefix}[{_STYLES[record.status]}]{record.status}[/]", end="")
        if outcome.skipped:
            text = f"  already there: {record.path}"
            text += "  (not sent to W&B; force=true redoes it)" if outcome.unsent else ""
        elif record.status == "ok":
            parts = [*_results(record), f"{outcome.wall_time_s:.0f} s in all"]
            text = f"  {', '.join(parts)}  {record.path}"
        else:
            text = f"  {record.status_detail}  (log: {outcome.folder / LOG_NAME})"
        self._console.print(text, markup=False, soft_wrap=True)

    def summary(self, records: Sequence[RunRecord]) -> None:
        """The table of the runs and, where several have numbers, the saved plot."""
        if not records:
            return
        benchmarks = [record for record in records if record.benchmark]
        for record in benchmarks:
            for line in record.benchmark["summary"] if record.benchmark else ():
                self._console.print(line, markup=False, soft_wrap=True)
        runs = [record for record in records if not record.benchmark]
        if self._job is None and len(runs) == 1 and has_answer(runs[0]):
            self._answer(runs[0])
        elif any(has_numbers(record) for record in runs):
            self._console.print(heading(runs), markup=False, soft_wrap=True)
            self._console.print(record_table(runs))
            for line in remarks(runs):
                self._console.print(line, markup=False, soft_wrap=True)
            self._plot(runs)

    def _answer(self, record: RunRecord) -> None:
        """All that one simulated run says, and its timeline as a picture."""
        self._console.print(answer_heading(record), markup=False, soft_wrap=True)
        self._console.print(answer_table(record))
        for line in answer_lines(record):
            self._console.print(line, markup=False, soft_wrap=True)
        assert record.path is not None
        picture = record.path.with_name("timeline.png")
        if not record.path.with_name(TIMELINE_NAME).exists():
            return
        from analysis.timeline import timeline_figure

        try:
            timeline_figure(record).savefig(picture, dpi=150)
            said = f"timeline (simulated): {picture}, {TIMELINE_NAME} beside it"
        except OSError as error:
            said = f"no picture: cannot write {picture} ({error.strerror or error})"
        self._console.print(said, markup=False, soft_wrap=True)

    def failures(self, failed: Sequence[tuple[Sequence[str], str, Any, Path | None]]) -> None:
        """Every job that is not ok: its status, overrides, reason and log."""
        if not failed:
            return
        self._console.print(f"{len(failed)} not ok:")
        for overrides, status, detail, path in failed:
            log = f"  log: {path.parent / LOG_NAME}" if path else ""
            line = f"  {status}: {' '.join(overrides)}\n    {detail}{log}"
            self._console.print(line, markup=False, soft_wrap=True)

    def _plot(self, records: Sequence[RunRecord]) -> None:
        records = [record for record in records if not record.search]
        if sum(peak_bytes(record) is not None for record in records) < 2:
            return
        from streambp.bench.quickplot import save_plot

        folder = records[0].path
        assert folder is not None
        target = folder.parent.parent / "memory_time.png"
        try:
            said = f"plot: {save_plot(records, target)}"
        except OSError as error:  # the records are there; a full disk costs the picture only
            said = f"no plot: cannot write {target} ({error.strerror or error})"
        self._console.print(said, markup=False, soft_wrap=True)


def _results(record: RunRecord) -> list[str]:
    """The numbers of a run in words; how they came to be, unless they were measured."""
    if record.search:
        return [str(record.search["message"])]
    peak, both = peak_bytes(record), median_s(record, "forward_backward_time")
    found = []
    if peak is not None:
        found.append(f"{_kind(record, 'memory')}peak {gib(peak)} GiB")
    if both is not None:
        found.append(f"{_kind(record, 'time')}forward+backward {seconds(both)} s")
    return found


def _kind(record: RunRecord, number: str) -> str:
    kind = record.provenance.get(number)
    return "" if kind in (None, "measured") else f"{kind} "


def _where(event: Event) -> str:
    if event["event"] == "phase":
        return str(event["name"])
    if event["event"] == "step":
        numbers = (f"{k} {v:.4f}" for k, v in event["metrics"].items() if v is not None)
        return f"step {event['step']}/{event['steps']}  " + "  ".join(numbers)
    return str(event.get("text", ""))
