"""Weights & Biases: one W&B run per run, fed from the supervising process.

A worker that is killed therefore still ends as a failed W&B run, and the record does not depend
on W&B in any way: what goes wrong there is a warning.
"""

from __future__ import annotations

import netrc
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from streambp.bench.config import TrackingConfig
from streambp.bench.progress import Event
from streambp.bench.records import RunRecord
from streambp.bench.tracking.base import Tracker
from streambp.bench.tracking.masking import masked
from streambp.bench.tracking.wandb_tables import tables_of


def mode(config: TrackingConfig) -> Literal["online", "offline", "disabled"]:
    """ "online" or "offline"; `auto` is online exactly when W&B has a key for this user."""
    wanted = config.mode if config.mode != "auto" else os.environ.get("WANDB_MODE")
    if wanted == "online" or (wanted not in ("offline", "disabled") and _has_key()):
        return "online"
    return "disabled" if wanted == "disabled" else "offline"


def _has_key() -> bool:
    """Whether `wandb login` (or the environment) left a key for the server that W&B would use."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    if not known:
        return False
    import wandb

    server = urlsplit(wandb.setup().settings.base_url).netloc
    return server in known or "api.wandb.ai" in known  # the second: written by older versions


def summary(record: RunRecord) -> dict[str, Any]:
    """Flat numbers of a record: status, memory fields, medians of the time samples."""
    values: dict[str, Any] = {"status": record.status, "status_detail": record.status_detail}
    for name, value in (record.memory or {}).items():
        if isinstance(value, (int, float)):
            values[f"memory/{name}"] = value
    for category, value in ((record.memory or {}).get("peak_by_category_bytes") or {}).items():
        values[f"memory/peak_by_category/{category}_bytes"] = value
    for name, samples in (record.time or {}).items():
        if name.endswith("_s_samples") and samples:
            values[f"time/{name.removesuffix('_samples')}_median"] = statistics.median(samples)
    for name, value in record.provenance.items():
        values[f"provenance/{name}"] = value
    return values


def _tags(record: RunRecord, own: Sequence[str]) -> list[str]:
    """The user's tags, then experiment, model, method, tuning, device: 64 characters at most."""
    groups = (record.config.get(name) for name in ("model", "method", "tuning", "device"))
    names = [group["name"] for group in groups if isinstance(group, Mapping)]
    tags = (str(masked(str(tag)))[:64] for tag in [*own, record.experiment, *names] if tag)
    return list(dict.fromkeys(tags))


class WandbTracker(Tracker):
    """Config, per-step metrics, raw time samples, memory, summary and status of one run."""

    def __init__(self, config: TrackingConfig, folder: Path):
        self._config = config
        self._folder = folder
        self._run: Any = None

    def start(self, record: RunRecord) -> None:
        self._guarded(lambda: self._start(record))

    def event(self, event: Event) -> None:
        if event["event"] == "step" and self._run is not None:
            metrics = {f"training/{k}": v for k, v in event["metrics"].items() if v is not None}
            self._guarded(lambda: self._run.log(metrics, step=event["step"]))

    def finish(self, record: RunRecord) -> None:
        if self._run is not None:
            self._guarded(lambda: self._finish(record))

    def _start(self, record: RunRecord) -> None:
        import wandb

        for name in ("project", "entity"):  # an address: masked, it would be another one
            if masked(getattr(self._config, name)) != getattr(self._config, name):
                raise ValueError(f"tracking.{name} looks like a secret, so nothing is sent")
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            group=masked(self._config.group or record.experiment),
            tags=_tags(record, self._config.tags),
            name=masked(record.job),
            id=record.run_id,
            dir=str(self._folder),
            mode=mode(self._config),
            reinit="finish_previous",
            config=masked(
                {
                    **record.config,
                    "versions": record.versions,
                    "hardware": record.hardware,
                    "git": record.git,
                    "fingerprint": record.fingerprint,
                    "overrides": record.overrides,
                }
            ),
            # W&B's own description of the machine has the unmasked command line and the address
            # of the git remote; the config above says as much without them.
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, disable_git=True, x_disable_meta=True
            ),
        )

    def _finish(self, record: RunRecord) -> None:
        import wandb

        self._run.summary.update(masked(summary(record)))
        for key, values in tables_of(record, self._folder).items():
            columns: list[str | int] = list(values.columns)
            table = wandb.Table(columns=columns, data=masked(values.rows))
            draw = getattr(wandb.plot, values.plot.kind)
            drawn = draw(table, **values.plot.columns, title=values.plot.title)
            self._run.log({key: table, f"{key}_plot": drawn})
        self._run.finish(exit_code=0 if record.status == "ok" else 1)
        self._run = None

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Tracking never costs a run: an error there is said once and tracking ends."""
        try:
            action()
        except Exception as error:
            self._run = None
            warnings.warn(f"W&B tracking stopped: {type(error).__name__}: {error}")
