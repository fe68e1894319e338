"""Hydra's `-m`: checks every job before the first one starts, then runs them all and sums up.

Launchers stay Hydra's own (basic, joblib, submitit). A job that fails never stops the others; a
launcher that fails (a worker process or a node died) leaves the records that there are.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf.errors import OmegaConfBaseException

from streambp.bench import folders, preflight, runner
from streambp.bench.cli import EXIT_FAILED, EXIT_INTERRUPTED, JOBS_VARIABLE, exit_code, stop
from streambp.bench.config import RunConfig
from streambp.bench.display import Display
from streambp.bench.records import RunRecord, iter_records

_ELSEWHERE = "SlurmLauncher"  # runs jobs on machines that this process knows nothing of


@dataclass
class SweeperConf:
    """The keys of `hydra.sweeper`. params: values by setting, one product. grids: several such,
    whose jobs are joined, each with `params` beside it. small_grids: taken with device=cpu."""

    _target_: str = "hydra_plugins.streambp_sweeper.StreambpSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    grids: list[dict[str, str]] = field(default_factory=list)
    small_grids: list[dict[str, str]] = field(default_factory=list)


class Sweeper(BasicSweeper):
    """The products that `SweeperConf` describes; a setting given on the command line replaces that
    of every grid."""

    def __init__(
        self,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
        grids: Sequence[Mapping[str, str]] = (),
        small_grids: Sequence[Mapping[str, str]] = (),
    ):
        super().__init__(max_batch_size, params)
        self._grids = list(grids)
        self._small_grids = list(small_grids)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None and self.launcher is not None
        jobs = self._jobs(arguments)
        homes = self._check(jobs)
        os.environ[JOBS_VARIABLE] = str(len(jobs))
        display = Display(None)
        display.sweep_starts(len(jobs))
        try:
            for home in dict.fromkeys(homes):
                folders.check_writable(home)
                runner.close_abandoned(home, display.event)
        except folders.RunsFolderError as error:
            stop(str(error))
        try:
            returns = self.launcher.launch(jobs, initial_job_idx=0)
            # (The property `return_value` would raise a job's error here.)
            results = [result._return_value for result in returns]
            found = [_record_or_error(result) for result in results]
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                for home in dict.fromkeys(homes):
                    folders.close_abandoned(home)
            queued = "; Slurm goes on with what is queued (scancel)" if self._elsewhere else ""
            print(
                "interrupted: finished jobs have their records; "
                f"the same command again runs what is missing{queued}",
                file=sys.stderr,
            )
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:
            print(f"the launcher failed: {type(error).__name__}: {error}", file=sys.stderr)
            found = _after_the_launcher(jobs, homes)
        records = [record for record in found if isinstance(record, RunRecord)]
        display.summary(records)
        display.failures(
            [
                (job, record.status, record.status_detail, record.path)
                if isinstance(record, RunRecord)
                else (job, "error", record, None)
                for job, record in zip(jobs, found, strict=True)
                if not isinstance(record, RunRecord) or record.status != "ok"
            ]
        )
        sys.exit(EXIT_FAILED if len(records) < len(jobs) else exit_code(records))

    @property
    def _elsewhere(self) -> bool:
        assert self.config is not None
        return str(self.config.hydra.launcher.get("_target_")).endswith(_ELSEWHERE)

    def _jobs(self, arguments: Sequence[str]) -> list[list[str]]:
        assert self.hydra_context is not None
        assert self.config is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        small = self._small_grids and self.config.device.name == "cpu"
        jobs: dict[tuple[str, ...], None] = {}  # in order; two grids may share a job
        for grid in (self._small_grids if small else self._grids) or [{}]:
            own = [f"{key}={value}" for key, value in grid.items()]
            overrides = parser.parse_overrides([*self._parse_config(), *own, *arguments])
            jobs.update(dict.fromkeys(map(tuple, self.split_arguments(overrides, None)[0])))
        return [list(job) for job in jobs]

    def _check(self, jobs: list[list[str]]) -> list[Path]:
        """Stop, naming the job, when one of them cannot run; nothing has started then.

        Returns the folder of each job's experiment. Whether the machine can do the job is not
        asked where it runs on another one.
        """
        assert self.hydra_context is not None and self.config is not None
        homes = []
        for job in jobs:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, job)
            try:
                values = {key: composed[key] for key in composed if key != "hydra"}
                config = RunConfig.from_hydra(_plain(values))
                if not self._elsewhere:
                    config, _ = preflight.resolve(config)
            except (ValueError, OmegaConfBaseException) as error:
                stop(f"{error}\n  in job: {' '.join(job)}")
            homes.append(Path(config.runs_dir) / config.experiment.name)
        return homes


def _record_or_error(value: Any) -> RunRecord | str:
    """The record of a job that returned its path; what the job raised otherwise."""
    return RunRecord.load(value["path"]) if isinstance(value, dict) else str(value)


def _after_the_launcher(jobs: Sequence[list[str]], homes: Sequence[Path]) -> list[RunRecord | str]:
    """The newest record of each job, or what to do about its absence."""
    newest: dict[tuple[Path, tuple[str, ...]], RunRecord] = {}
    for home in dict.fromkeys(homes):
        folders.close_abandoned(home)
        for record in sorted(iter_records(home), key=lambda record: record.finished_at):
            newest[home, tuple(record.overrides)] = record
    missing = "no record: it still runs, or never started. The same command again tells"
    return [newest.get((home, tuple(job)), missing) for job, home in zip(jobs, homes, strict=True)]


def _plain(values: dict[Any, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
