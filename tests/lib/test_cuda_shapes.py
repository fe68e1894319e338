"""The CUDA paths as far as a CPU can follow them: shapes, dtypes and calls on fake tensors.

B batch, T sequence, C chunk, H query heads, K key/value heads, E head dim.
"""

import pytest
import torch
from libtools import batch_of, build
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp import attention, kernels
from streambp.attention import ChunkView
from streambp.chunks import partition
from streambp.kernels import CUDA_EFFICIENT, CUDA_FLASH, Scoring
from streambp.kv import KVStream
from streambp.masks import DenseMask
from streambp.sim.fake import fake_mode, to_fake, without_data

B, T, H, K, E = 2, 37, 4, 2, 16


class Names(TorchDispatchMode):
    """Names of the attention ops that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_attention" in func.__name__:
            self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake():
    with fake_mode(), kernels.use_device("cuda"):
        yield


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(CUDA_FLASH, torch.bfloat16), (CUDA_EFFICIENT, torch.bfloat16),
     (CUDA_EFFICIENT, torch.float32)],
)  # fmt: skip
def test_kernel_shapes(fake, kernel, dtype, biased):
    if biased and kernel is CUDA_FLASH:
        pytest.skip("flash takes no bias")
    num_queries, num_keys = 13, 21
    q = torch.empty(B, H, num_queries, E, dtype=dtype)
    k = torch.empty(B, H, num_keys, E, dtype=dtype)
    bias = torch.empty(1, 1, num_queries, num_keys, dtype=dtype) if biased else None
    scoring = Scoring(scale=1.0)
    out, lse = kernel.forward(q, k, k, bias, False, scoring)
    assert out.shape == q.shape
    assert lse.shape == (B, H, num_queries)
    assert lse.dtype == torch.float32
    grads = kernel.backward(out, q, k, k, out, lse, bias, False, scoring)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    assert {g.dtype for g in grads} == {dtype}


@pytest.mark.parametrize("chunk_size", [1, 8, 37, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_chunk_attention_shapes(fake, dtype, masked, chunk_size):
    """Unmasked 16-bit chunks take one flash call; masks and fp32 the memory-efficient kernel."""
    mask = DenseMask(torch.ones(B, 1, T, T, dtype=torch.bool)) if masked else None
    q, grad = (torch.empty(B, H, T, E, dtype=dtype) for _ in range(2))
    kv = KVStream(T)
    kv.keys, kv.values = (torch.empty(B, K, T, E, dtype=dtype) for _ in range(2))
    chunks = partition(T, chunk_size)
    kv.start_gradients(len(chunks))
    plans = attention.plan(mask, chunks)
    for chunk, blocks in zip(chunks, plans, strict=True):
        view = ChunkView(kv=kv, chunk=chunk, blocks=blocks, mask=mask)
        part = q[:, :, view.span]
        with Names() as names:
            out, lse = attention.attend(part, view, Scoring(scale=1.0))
            dq = attention.attend_backward(
                grad[:, :, view.span], part, out, lse, view, Scoring(scale=1.0)
            )
        assert out.shape == dq.shape == part.shape
        assert out.dtype == dq.dtype == dtype
        assert lse.shape == part.shape[:3]
        flash = dtype == torch.bfloat16 and not masked
        wanted = "_scaled_dot_product_" + ("flash" if flash else "efficient") + "_attention"
        assert {name.removesuffix("_backward") for name in names.names} == {wanted}
        if flash:
            assert names.names[0] == wanted
            assert names.names.count(wanted) == 1


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("options", [{}, {"keep_kv": True, "keep_attention": True}])
def test_a_whole_step_on_fake_tensors(padding, options):
    """The library never looks at a value, so a model without storage streams too."""
    model = build(hidden_size=64, head_dim=16, dtype=torch.bfloat16)
    shapes = {name: t.shape for name, t in batch_of(padding=padding).items()}
    mode = fake_mode()
    to_fake(model, mode)
    with mode, kernels.use_device("cuda"):
        streambp.enable(model, chunk_size=8, head_chunk_size=8, **options)
        batch = {name: torch.empty(shape, dtype=torch.long) for name, shape in shapes.items()}
        with Names() as names, without_data(padding=padding != "none"):
            loss = model(**batch).loss
            loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad.shape == p.shape for p in model.parameters())
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        assert {n.removesuffix("_backward") for n in names.names} == {
            "_scaled_dot_product_flash_attention"
        }
        kept = names.names.count("_scaled_dot_product_flash_attention")
        assert kept == (4 if options else 8)  # two layers of two chunks, once or twice
