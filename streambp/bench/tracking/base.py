"""The tracker interface, and the one that does nothing."""

from __future__ import annotations

from pathlib import Path

from streambp.bench.config import TrackingConfig
from streambp.bench.progress import Event
from streambp.bench.records import RunRecord


class Tracker:
    """Follows one run from the supervising process. This base class does nothing."""

    def start(self, record: RunRecord) -> None:
        """The run begins; the record has its config, versions and hardware."""

    def event(self, event: Event) -> None:
        """A progress event of the worker."""

    def finish(self, record: RunRecord) -> None:
        """The run ended, in whatever way; the record is complete and already written."""


def tracker_for(config: TrackingConfig, folder: Path) -> Tracker:
    """The tracker that `tracking` names; its own files go below the run's folder."""
    if config.name == "wandb":
        from streambp.bench.tracking.wandb_tracker import WandbTracker

        return WandbTracker(config, folder)
    return Tracker()
