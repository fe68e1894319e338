"""Instruments that read memory: live tensors, peak RSS, the CUDA allocator, NVML."""

from streambp.bench.memory.budget import OverBudgetError
from streambp.bench.memory.cpu import measure_cpu
from streambp.bench.memory.cuda import CudaAllocator, limit_budget, measure_cuda
from streambp.bench.memory.live import LiveReading, track_step
from streambp.bench.memory.nvml import NvmlReading, read_nvml
from streambp.bench.memory.rss import RssPeak, RssReading
from streambp.bench.memory.state import fill_gradients, state_bytes

__all__ = [
    "CudaAllocator",
    "LiveReading",
    "NvmlReading",
    "OverBudgetError",
    "RssPeak",
    "RssReading",
    "fill_gradients",
    "limit_budget",
    "measure_cpu",
    "measure_cuda",
    "read_nvml",
    "state_bytes",
    "track_step",
]
