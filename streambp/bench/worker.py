"""Executes one run in its own process: `python -m streambp.bench.worker <run folder> <fd>`.

Reads `config.yaml` from the folder, writes nothing there itself: events and record sections go to
the pipe `fd`, the text output to whatever stdout is. Ends by itself when its supervisor dies.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from streambp.bench.config import RunConfig
from streambp.bench.progress import PipeProgress, Progress

# What a failed allocation says: torch's CUDA and CPU allocators, the operating system.
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "cannot allocate memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch.OutOfMemoryError, MemoryError, and RuntimeErrors of a failed allocation."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """True when a message is that of a failed allocation."""
    text = text.lower()
    return any(phrase in text for phrase in _OUT_OF_MEMORY)


def execute(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Do the work of one run and return the record's sections."""
    if config.experiment.kind == "benchmark":
        from streambp.bench import benchmark

        return benchmark.run(config, progress)
    if config.experiment.kind == "linear_example":
        from streambp.bench import linear_example

        return linear_example.run(config, progress)
    if config.experiment.kind == "fidelity":
        from streambp.sim import fidelity

        return fidelity.run(config, progress)
    if config.searches:
        from streambp.bench import search

        return search.run(config, progress)
    from streambp.bench import devices

    return devices.run(config, progress)


def outcome(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """{"status", "status_detail", "sections"} of a run; failures become a status, not a raise."""
    try:
        return {"status": "ok", "status_detail": None, "sections": execute(config, progress)}
    except Exception as error:
        traceback.print_exc()
        status = "oom" if is_out_of_memory(error) else "error"
        detail = f"{type(error).__name__}: {error}"
        return {"status": status, "status_detail": detail, "sections": {}}


def _end_with_supervisor() -> None:
    """Leave when stdin closes: the supervisor holds its other end for as long as it lives."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(folder: str, descriptor: str) -> None:
    import yaml

    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    progress = PipeProgress(int(descriptor))
    config = RunConfig.from_dict(yaml.safe_load((Path(folder) / "config.yaml").read_text()))
    progress.emit({"event": "outcome", **outcome(config, progress)})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing left to save; some libraries abort while the interpreter shuts down


if __name__ == "__main__":
    main(*sys.argv[1:])
