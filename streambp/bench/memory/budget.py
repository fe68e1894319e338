"""Out of memory on a device that can't enforce a budget while a run goes on."""

from __future__ import annotations

__all__ = ["OverBudgetError"]


class OverBudgetError(MemoryError):
    """The run's peak exceeds ``budget_gib``. A ``MemoryError``, so the run's status is "oom"."""

    def __init__(self, peak_bytes: int, budget_bytes: int):
        super().__init__(
            f"the peak of {peak_bytes / 2**30:.4f} GiB exceeds budget_gib={budget_bytes / 2**30:g}"
        )
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
