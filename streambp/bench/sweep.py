"""Hydra's `-m`: checks every job before the first one starts, then runs them all and sums up.

Launchers stay Hydra's own (basic, joblib, submitit). A job that fails never stops the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from streambp.bench import preflight
from streambp.bench.cli import EXIT_FAILED, EXIT_INTERRUPTED, JOBS_VARIABLE, exit_code, stop
from streambp.bench.config import RunConfig
from streambp.bench.display import Display
from streambp.bench.records import RunRecord


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
        self._check(jobs)
        os.environ[JOBS_VARIABLE] = str(len(jobs))
        display = Display(None)
        display.sweep_starts(len(jobs))
        try:
            returns = self.launcher.launch(jobs, initial_job_idx=0)
        except KeyboardInterrupt:
            print(
                "interrupted: finished jobs have their records; "
                "the same command again runs what is missing",
                file=sys.stderr,
            )
            sys.exit(EXIT_INTERRUPTED)
        records, failures = [], []
        for overrides, result in zip(jobs, returns, strict=True):
            value = result._return_value  # the property would raise a job's error here
            if isinstance(value, dict):
                record = RunRecord.load(value["path"])
                records.append(record)
                if record.status != "ok":
                    failures.append((overrides, record.status, record.status_detail, record.path))
            else:
                failures.append((overrides, "error", str(value), None))
        display.summary(records)
        display.failures(failures)
        lost = len(jobs) - len(records)
        sys.exit(EXIT_FAILED if lost else exit_code(records))

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

    def _check(self, jobs: list[list[str]]) -> None:
        """Stop, naming the job, when one of them cannot run; nothing has started then."""
        assert self.hydra_context is not None and self.config is not None
        for job in jobs:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, job)
            values = {key: composed[key] for key in composed if key != "hydra"}
            try:
                preflight.resolve(RunConfig.from_hydra(_plain(values)))
            except ValueError as error:
                stop(f"{error}\n  in job: {' '.join(job)}")


def _plain(values: dict[Any, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
