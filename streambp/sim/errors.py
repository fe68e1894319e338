"""Why a simulation could not be run. Nothing here ever becomes a number."""


class SimulationError(RuntimeError):
    """The program did something that tensors without data can't follow."""


class NothingFitsError(ValueError, MemoryError):
    """The budget is smaller than what is resident before the first token, or than any setting
    needs. A `MemoryError` too, so a run's status is "oom"."""
