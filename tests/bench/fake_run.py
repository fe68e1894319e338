"""run.py with the fake worker: `python fake_run.py key=value ...`."""

import runpy
import sys
from pathlib import Path

from streambp.bench import supervise

supervise.WORKER = (str(Path(__file__).with_name("fake_worker.py")),)
RUN = str(Path(__file__).resolve().parents[2] / "run.py")
sys.argv[0] = RUN
sys.path[0] = str(Path(RUN).parent)
runpy.run_path(RUN, run_name="__main__")
