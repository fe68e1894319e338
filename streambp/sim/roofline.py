"""Predicted time of an op from its FLOPs and the bytes it moves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from streambp.sim.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """An op takes the longer of computing and moving, and at least the time to launch it.

    Args:
        matmul_efficiency, attention_efficiency: share of the peak rate reached.
        bandwidth_efficiency: share of the memory bandwidth reached.
        launch_time_s: shortest time from one kernel to the next.

    The efficiencies are stated assumptions, not measurements.
    """

    gpu: Gpu
    matmul_efficiency: float = 0.75
    attention_efficiency: float = 0.55
    bandwidth_efficiency: float = 0.80
    launch_time_s: float = 5e-6

    def op_time_s(
        self, kind: str, flops: int, bytes_moved: int, dtype: torch.dtype | None
    ) -> float:
        """Predicted seconds of one op of `kind` ("matmul", "attention" or "other")."""
        moving = bytes_moved / (self.gpu.bandwidth_bytes_per_s * self.bandwidth_efficiency)
        sixteen_bit = dtype in (torch.bfloat16, torch.float16)
        peak = self.gpu.peak_bf16_flops_per_s if sixteen_bit else self.gpu.peak_fp32_flops_per_s
        efficiency = self.attention_efficiency if kind == "attention" else self.matmul_efficiency
        return max(moving, flops / (peak * efficiency), self.launch_time_s)

    def __str__(self) -> str:
        """The stated assumptions in words."""
        bf16, fp32 = (
            f"{rate / 1e12:g}"
            for rate in (self.gpu.peak_bf16_flops_per_s, self.gpu.peak_fp32_flops_per_s)
        )
        return (
            f"a roofline of {self.gpu.name} with assumed efficiencies: "
            f"{self.matmul_efficiency:.0%} of {bf16} TFLOP/s (fp32: {fp32}) in products and "
            f"{self.attention_efficiency:.0%} in attention, {self.bandwidth_efficiency:.0%} of "
            f"{self.gpu.bandwidth_bytes_per_s / 1e9:g} GB/s, at least "
            f"{1e6 * self.launch_time_s:g} us for a kernel"
        )

    def to_dict(self) -> dict[str, Any]:
        """The stated assumptions, as recorded."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "gpu": self.gpu.name}
