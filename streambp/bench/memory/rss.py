"""Peak resident set size of this process over a block, by the best reading the system offers.

1. Linux that lets a process reset its high-water mark: ``VmHWM`` of ``/proc/self/status`` after a
   5 written to ``/proc/self/clear_refs``. Exact: the kernel keeps the mark, nothing is sampled.
2. Linux that refuses the reset: the resident size sampled by a thread; short peaks may be missed.
3. Elsewhere: ``ru_maxrss``, the high-water mark of the process since it started.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RssPeak", "RssReading"]

SAMPLING_INTERVAL_S = 0.002


@dataclass(kw_only=True, frozen=True)
class RssReading:
    """``how``: "reset" (exact over the block), "sampled" (a lower bound of it) or "lifetime" (an
    upper bound, since the process started)."""

    peak_rss_bytes: int
    how: str


class RssPeak:
    """Context manager that measures the peak resident set size of its block.

    After the block, ``reading`` holds the result. ``proc`` is where procfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")):
        self.reading: RssReading | None = None
        self._proc = proc / "self"
        self._how = "lifetime"
        self._sampler: _Sampler | None = None

    def __enter__(self) -> RssPeak:
        if self._reset_high_water_mark():
            self._how = "reset"
        elif (self._proc / "statm").is_file():
            self._how = "sampled"
            self._sampler = _Sampler(self._proc / "statm")
            self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._sampler is not None:
            peak = self._sampler.stop()
        elif self._how == "reset":
            peak = _high_water_mark_bytes(self._proc / "status")
        else:
            peak = _lifetime_peak_bytes()
        self.reading = RssReading(peak_rss_bytes=peak, how=self._how)

    def _reset_high_water_mark(self) -> bool:
        try:
            (self._proc / "clear_refs").write_text("5")
            _high_water_mark_bytes(self._proc / "status")
        except (OSError, ValueError):
            return False
        return True


class _Sampler(threading.Thread):
    def __init__(self, statm: Path):
        super().__init__(name="rss-sampler", daemon=True)
        self._statm = statm
        self._stopping = threading.Event()
        self._peak = self._resident_bytes()

    def run(self) -> None:
        while not self._stopping.wait(SAMPLING_INTERVAL_S):
            self._peak = max(self._peak, self._resident_bytes())

    def stop(self) -> int:
        self._stopping.set()
        self.join()
        return max(self._peak, self._resident_bytes())

    def _resident_bytes(self) -> int:
        return int(self._statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _high_water_mark_bytes(status: Path) -> int:
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{status} has no VmHWM line")


def _lifetime_peak_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
