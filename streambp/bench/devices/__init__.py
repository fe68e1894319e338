"""Where a run happens: a GPU, the CPU, or simulated."""

from streambp.bench.devices.choose import DeviceChoice, choose, resolve, resolve_dtype
from streambp.bench.devices.run import run

__all__ = ["DeviceChoice", "choose", "resolve", "resolve_dtype", "run"]
