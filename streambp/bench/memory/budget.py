"""Out of memory on a device that can't enforce a budget while a run goes on."""

from __future__ import annotations

__all__ = ["OverBudgetError"]


class OverBudgetError(MemoryError):
    """The run's peak exceeds its budget. A ``MemoryError``, so the run's status is "oom".

    ``simulated_on``: the GPU of a simulated run, whose usable memory is the budget too.
    """

    def __init__(self, peak_bytes: int, budget_bytes: int, *, simulated_on: str | None = None):
        peak, budget = peak_bytes / 2**30, budget_bytes / 2**30
        super().__init__(
            f"the peak of {peak:.4f} GiB exceeds budget_gib={budget:g}"
            if simulated_on is None
            else f"the simulated peak of {peak:.2f} GiB exceeds the {budget:.2f} GiB that a run "
            f"may use on {simulated_on}"
        )
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
