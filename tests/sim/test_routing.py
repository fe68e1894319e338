"""Which kernel a GPU's attention runs, how its output is laid out and what its mask costs."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.sim.errors import SimulationError
from streambp.sim.fake import fake_mode
from streambp.sim.gpus import gpu_named
from streambp.sim.routing import UNROUTED, cuda_attention
from streambp.sim.tracker import LiveTracker
from streambp.sim.workspaces import ATTENTION_WORKSPACES

aten = torch.ops.aten
B, H, T, E = 1, 4, 24, 16


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def attend(gpu, *, mask=None, dtype=torch.bfloat16, head_dim=E, kv_heads=H, length=T, **kwargs):
    """(output, names of the ops run) of causal attention on `gpu`."""
    with fake_mode(), cuda_attention(gpu_named(gpu)), Names() as names:
        q = torch.empty(B, H, length, head_dim, dtype=dtype, requires_grad=True)
        k, v = (
            torch.empty(B, kv_heads, length, head_dim, dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        bias = None
        if mask is not None:
            bias = torch.empty(B, 1, length, length, dtype=mask)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=kv_heads != H, **kwargs
        )
        out.sum().backward()
    return out, names.names


def kernels_in(names):
    return [name for name in names if "scaled_dot_product" in name]


@pytest.mark.parametrize(
    ("gpu", "arguments", "kernel"),
    [
        ("a800_80gb", {}, "flash"),
        ("a800_80gb", {"kv_heads": 2}, "flash"),
        ("a800_80gb", {"mask": torch.bfloat16}, "efficient"),
        ("a800_80gb", {"mask": torch.bool}, "efficient"),
        ("a800_80gb", {"dtype": torch.float32}, "efficient"),
        ("a800_80gb", {"head_dim": 20}, "flash"),  # padded to 24
        ("rtx4090_24gb", {"head_dim": 216}, "efficient"),
        ("rtx4090_24gb", {"head_dim": 256}, "flash"),
        ("h100_80gb", {}, "cudnn"),
        ("h100_80gb", {"mask": torch.bfloat16}, "cudnn"),
        ("h100_80gb", {"head_dim": 256}, "flash"),
    ],
)
def test_the_kernel_and_its_backward(gpu, arguments, kernel):
    _, names = attend(gpu, **arguments)
    found = kernels_in(names)
    assert len(found) == 2 and all(kernel in name for name in found)


def test_layouts_decide_whether_the_next_contiguous_copies():
    flash, _ = attend("a800_80gb")
    efficient, _ = attend("a800_80gb", mask=torch.bfloat16)
    assert flash.is_contiguous()  # as its query: (B, H, T, E)
    assert efficient.transpose(1, 2).is_contiguous()  # (B, T, H, E)


def test_a_boolean_mask_becomes_a_16_bit_one_and_odd_rows_are_padded():
    def mask_bytes(mask, length):
        tracker = LiveTracker()
        with fake_mode(), cuda_attention(gpu_named("a800_80gb")), tracker:
            q, k, v = (
                torch.empty(B, H, length, E, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            bias = torch.empty(B, 1, length, length, dtype=mask)
            before = tracker.live_bytes
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            lse = B * H * -(-length // 32) * 32 * 4
            extra = tracker.live_bytes - before - out.nbytes - lse
        return extra

    assert mask_bytes(torch.bfloat16, 24) < 64
    assert mask_bytes(torch.bool, 24) == pytest.approx(2 * 24 * 24, abs=64)
    assert mask_bytes(torch.bfloat16, 23) == pytest.approx(2 * 23 * 24, abs=64)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": torch.float64},
        {"dtype": torch.float32, "kv_heads": 2},
        {"dtype": torch.float32, "head_dim": 18},
    ],
)
def test_the_math_fallback_is_refused(arguments):
    with pytest.raises(SimulationError, match="math fallback"):
        attend("a800_80gb", **arguments)


def test_attention_that_escapes_the_routing_is_refused():
    tracker = LiveTracker(workspaces=UNROUTED)
    escaped = F.scaled_dot_product_attention  # taken before it is replaced
    with fake_mode(), cuda_attention(gpu_named("a800_80gb")), tracker:
        q = torch.empty(B, H, T, E, dtype=torch.bfloat16)
        with pytest.raises(SimulationError, match="CPU kernel"):
            escaped(q, q, q, is_causal=True)


def test_workspace_bytes_of_the_backward_kernels():
    query = torch.empty(2, 8, 100, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 4, 300, 64, dtype=torch.bfloat16, device="meta")
    flash = ATTENTION_WORKSPACES[aten._scaled_dot_product_flash_attention_backward.default]
    rows = 2 * 8 * 128
    assert flash((None, query, query), {}, None) == rows * (64 + 1) * 4
    grouped = 2 * 2 * 8 * 300 * 64 * 2
    assert flash((None, query, key), {}, None) == rows * (64 + 1) * 4 + grouped
    efficient = ATTENTION_WORKSPACES[aten._scaled_dot_product_efficient_attention_backward.default]
    assert efficient((None, query, query), {}, None) == rows * 64 * 4
