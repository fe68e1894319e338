"""Stands in for the worker: does at once what `experiment.options.behaviour` says.

Speaks the worker's protocol without importing the package, so that it starts in milliseconds.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import yaml


def main(folder: str, descriptor: str) -> None:
    config = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    behaviour = config["experiment"]["options"].get("behaviour", "ok")

    def emit(event: dict) -> None:
        os.write(int(descriptor), (json.dumps(event) + "\n").encode())

    def end_with_supervisor() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=end_with_supervisor, daemon=True).start()
    emit({"event": "phase", "name": "training"})
    emit({"event": "step", "step": 1, "steps": 1, "metrics": {"loss": 2.5, "grad_norm": 1.0}})
    training = {"loss_per_step": [2.5], "grad_norm_per_step": [1.0]}
    emit({"event": "section", "name": "training", "values": training})
    print("working", flush=True)
    if behaviour == "message":
        emit({"event": "message", "text": "seq_len=64 fits"})
    if behaviour in ("sleep", "slow"):
        (Path(folder) / "worker.pid").write_text(str(os.getpid()))
        time.sleep(60 if behaviour == "sleep" else 0.15)
    if behaviour.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, behaviour))
        time.sleep(60)
    if behaviour == "exit":
        sys.exit(7)
    if behaviour == "bad_alloc":
        print("terminate called after throwing an instance of 'std::bad_alloc'", flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    sections = {
        "memory": {"peak_live_bytes": 2**30, "activation_peak_bytes": 2**28},
        "time": {"forward_backward_time_s_samples": [3.0, 1.0, 2.0]},
        "provenance": {"memory": "measured", "time": "measured"},
        "notes": ["from the worker"],
        "timeline": {"live_bytes": [1, 2, 3]},
    }
    status = behaviour if behaviour in ("oom", "error") else "ok"
    detail = None if status == "ok" else f"{status} on purpose"
    sections = sections if status == "ok" else {}
    emit({"event": "outcome", "status": status, "status_detail": detail, "sections": sections})


if __name__ == "__main__":
    main(*sys.argv[1:])
