"""The two-matrix example of the paper's table 8, on tensors without storage.

Z = (X W1) W2, L = sum(Z), with X (N, D) and W1, W2 (D, D) in fp32; backward over row chunks of X.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streambp.sim.fake import fake_mode
from streambp.sim.gpus import Gpu
from streambp.sim.tracker import WORKSPACES, LiveTracker, register_model
from streambp.sim.workspaces import MATMUL_COPIES, cublas_workspace_bytes

ROWS = 100_000
WIDTH = 16_384


@dataclass(frozen=True, kw_only=True)
class LinearExample:
    """Simulated peak, and what of it is neither X, weights, gradients nor cuBLAS workspaces."""

    num_chunks: int
    peak_bytes: int
    intermediate_bytes: int


def simulate_linear_example(
    num_chunks: int, gpu: Gpu, *, rows: int = ROWS, width: int = WIDTH
) -> LinearExample:
    """Run `for x in X.chunk(num_chunks): ((x @ W1) @ W2).sum().backward()` without storage."""
    mode = fake_mode()
    tracker = LiveTracker(round_to=512, workspaces=MATMUL_COPIES)
    with mode:
        layers = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.empty(width, width)) for _ in range(2)]
        )
        with tracker, register_model(tracker, layers):
            x = torch.empty(rows, width)
            tracker.register(x, "inputs", "X")
            workspaces = [
                torch.empty(size, dtype=torch.uint8) for size in cublas_workspace_bytes(gpu.sm)
            ]
            for workspace in workspaces:
                tracker.register(workspace, WORKSPACES, "cuBLAS workspace")
            for part in x.chunk(num_chunks):
                z = (part @ layers[0]) @ layers[1]
                loss = z.sum()
                loss.backward()
            peak = tracker.peak_bytes
            del z, loss
            lasting = tracker.live_bytes
    del workspaces, x
    return LinearExample(num_chunks=num_chunks, peak_bytes=peak, intermediate_bytes=peak - lasting)
