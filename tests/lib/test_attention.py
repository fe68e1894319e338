"""Masks by block, kernels and prefix attention, each against a dense reference.

B batch, T sequence, C chunk, H query heads, K key/value heads, N keys, E head dim.
"""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import masking_utils

from streambp import attention, kernels, masks
from streambp.attention import ChunkView, PrefixAttention
from streambp.chunks import Chunk, partition
from streambp.kernels import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, MATH, Scoring
from streambp.kv import KVStream

F64 = torch.float64


# ---- chunks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(0, 12))
@pytest.mark.parametrize("chunk_size", range(1, 15))
def test_chunks_cover_every_token_once(length, chunk_size):
    chunks = partition(length, chunk_size)
    assert [i for c in chunks for i in range(c.start, c.end)] == list(range(length))
    assert all(c.size == chunk_size for c in chunks[:-1])
    assert all(1 <= c.size <= chunk_size for c in chunks)


@pytest.mark.parametrize("chunk_size", [0, -3, 1.5, None, True])
def test_chunk_sizes_that_cannot_be(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size={chunk_size!r}"):
        partition(5, chunk_size)


# ---- masks -----------------------------------------------------------------------------------

T = 14


def padding_mask(*pads, side="left"):
    mask = torch.ones(len(pads), T, dtype=torch.bool)
    for row, num in enumerate(pads):
        mask[row, slice(0, num) if side == "left" else slice(T - num, T)] = False
    return mask


def causal(batch_size=1):
    return torch.ones(batch_size, 1, T, T, dtype=torch.bool).tril()


def windowed(window, batch_size=1):
    return causal(batch_size).triu(1 - window)


def interface(function=masking_utils.causal_mask_function, padding=None, batch_size=1, **kwargs):
    return masks.mask_interface(
        batch_size=batch_size, q_length=T, kv_length=T, mask_function=function,
        attention_mask=padding, device=torch.device("cpu"), **kwargs,
    )  # fmt: skip


def sliding(window, padding=None, batch_size=1):
    function = masking_utils.sliding_window_causal_mask_function(window)
    return interface(function, padding, batch_size, local_size=window)


def packed(segments):
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(segments)
    )
    return interface(function, batch_size=2, allow_is_causal_skip=False)


SEGMENTS = torch.tensor([[0] * 3 + [1] * 8 + [2] * 3, [0] * 5 + [1] + [2] * 8])
_ISOLATED = (SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]) & causal(2)
_LEFT, _RIGHT = padding_mask(0, 5, 13), padding_mask(2, 9, 0, side="right")
_HOLES = (torch.rand(2, 3, T, T, generator=torch.Generator().manual_seed(0)) < 0.7) & causal(2)

#: name -> (mask to test, dense bool mask it stands for)
MASKS = {
    "causal": (lambda: interface(), causal()),
    "left padding": (lambda: interface(padding=_LEFT, batch_size=3),
                     causal(3) & _LEFT[:, None, None]),
    "right padding": (lambda: interface(padding=_RIGHT, batch_size=3),
                      causal(3) & _RIGHT[:, None, None]),
    "packed": (lambda: packed(SEGMENTS), _ISOLATED),
    "dense": (lambda: masks.DenseMask(_HOLES), _HOLES),
    "dense causal": (lambda: masks.DenseMask(causal()), causal()),
    "additive": (lambda: masks.DenseMask(torch.zeros(2, 3, T, T).masked_fill(~_HOLES, -1e38)),
                 _HOLES),
    "padded window": (lambda: sliding(4, _LEFT, 3), windowed(4, 3) & _LEFT[:, None, None]),
    **{f"window {w}": (lambda w=w: sliding(w), windowed(w)) for w in (1, 2, 5, 13, 14, 20)},
}  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 6, 13, 14, 30])
@pytest.mark.parametrize("name", MASKS)
def test_block_plans_stand_for_their_mask(name, chunk_size):
    """Blocks are disjoint, in order, show what the mask shows and skip what nobody sees."""
    make, dense = MASKS[name]
    mask = make()
    chunks = partition(T, chunk_size)
    for chunk, blocks in zip(chunks, attention.plan(mask, chunks), strict=True):
        rows = dense[:, :, chunk.start : chunk.end]
        shown = torch.zeros_like(rows)
        for block in blocks:
            assert 0 <= block.start < block.end <= chunk.end
            columns = slice(block.start, block.end)
            if block.kind == "masked":
                assert mask is not None
                visible = mask.visible(chunk, block.start, block.end)
                bias = mask.bias(chunk, block.start, block.end, F64)
                assert torch.equal(bias == 0, visible)
                assert (bias[~visible] < -1e30).all()
                shown[..., columns] = visible
            elif block.kind == "causal":
                assert (block.start, block.end) == (chunk.start, chunk.end)
                shown[..., columns] = causal()[..., chunk.start : chunk.end, columns]
            else:
                shown[..., columns] = True
        assert torch.equal(shown, rows)
        assert all(a.end <= b.start for a, b in itertools.pairwise(blocks))
        seen = rows.flatten(0, -2).any(0)[: chunk.start].nonzero()
        first = int(seen[0]) if len(seen) else chunk.start
        assert min(block.start for block in blocks) >= min(first, chunk.start)


@pytest.mark.parametrize("name", ["causal", "dense causal", "window 14", "window 20"])
def test_plain_causal_needs_no_mask(name):
    mask = MASKS[name][0]()
    chunks = partition(T, 4)
    kinds = {block.kind for blocks in attention.plan(mask, chunks) for block in blocks}
    assert kinds == {"full", "causal"}


def test_right_padding_keeps_masks_off_the_chunks_before_it():
    mask = interface(padding=padding_mask(2, side="right"))
    plans = attention.plan(mask, partition(T, 4))
    assert [[block.kind for block in blocks] for blocks in plans[:3]] == [
        ["causal"], ["full", "causal"], ["full", "causal"]]  # fmt: skip


def test_windows_read_no_more_keys_than_they_see():
    for chunk, blocks in zip(partition(T, 3), sliding(4).plan(partition(T, 3)), strict=True):
        assert sum(block.end - block.start for block in blocks) <= chunk.size + 3


def test_masks_that_may_look_ahead_are_refused():
    ahead = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: q >= 0)
    for function in (ahead, lambda b, h, q, k: k <= q + 1):
        with pytest.raises(ValueError, match="look ahead"):
            interface(function)
    with pytest.raises(ValueError, match="look ahead"):
        interface(use_vmap=True)
    with pytest.raises(ValueError, match="empty"):
        masks.mask_interface(batch_size=1, q_length=3, kv_length=5)


# ---- kernels ---------------------------------------------------------------------------------


def scores_of(q, k, bias, is_causal, scoring):
    scores = q @ k.transpose(-1, -2) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def randoms(*shapes, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=F64).to(dtype) for s in shapes]


KERNEL_CASES = [
    (CPU_FLASH, False, None), (CPU_FLASH, True, None), (MATH, False, None), (MATH, True, None),
    (MATH, False, 1.5), (MATH, True, 1.5),
]  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kernel", "is_causal", "softcap"), KERNEL_CASES)
def test_kernels_forward_and_backward_with_a_merged_normaliser(kernel, is_causal, softcap, biased):
    """Two blocks of one softmax: each block's gradients from the merged output and lse."""
    biased = biased and not is_causal
    num_queries = 7
    num_keys = (num_queries, 5) if is_causal else (9, 5)
    scoring = Scoring(scale=0.4, softcap=softcap)
    q, grad = randoms((2, 3, num_queries, 4), (2, 3, num_queries, 4))
    ks = randoms(*[(2, 3, n, 4) for n in num_keys], seed=1)
    vs = randoms(*[(2, 3, n, 4) for n in num_keys], seed=2)
    biases = randoms(*[(2, 3, num_queries, n) for n in num_keys], seed=3) if biased else [None] * 2
    causals = (is_causal, False)

    leaves = [t.requires_grad_() for t in (q, *ks, *vs)]
    scores = [scores_of(q, k, b, c, scoring) for k, b, c in zip(ks, biases, causals, strict=True)]
    joint = torch.cat(scores, -1)
    want_out, want_lse = joint.softmax(-1) @ torch.cat(vs, 2), joint.logsumexp(-1)
    wanted = torch.autograd.grad(want_out, leaves, grad)

    with torch.no_grad():
        dq = torch.zeros_like(q)
        for i in (0, 1):
            args = (q, ks[i], vs[i])
            out, lse = kernel.forward(*args, biases[i], causals[i], scoring)
            torch.testing.assert_close(lse, scores[i].logsumexp(-1).detach())
            torch.testing.assert_close(out, scores[i].softmax(-1).detach() @ vs[i])
            part_q, dk, dv = kernel.backward(
                grad, *args, want_out, want_lse, biases[i], causals[i], scoring
            )
            dq += part_q
            torch.testing.assert_close(dk, wanted[1 + i])
            torch.testing.assert_close(dv, wanted[3 + i])
        torch.testing.assert_close(dq, wanted[0])


def test_math_takes_values_of_another_width():
    scoring = Scoring(scale=0.5)
    q, k, v = (t.requires_grad_() for t in randoms((1, 2, 3, 4), (1, 2, 6, 4), (1, 2, 6, 7)))
    assert kernels.select(q, v, biased=False, scoring=scoring) is MATH
    out = sdpa(q, k, v, scale=0.5)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        found, lse = MATH.forward(q, k, v, None, False, scoring)
        torch.testing.assert_close(found, out.detach())
        grads = MATH.backward(grad, q, k, v, found, lse, None, False, scoring)
    for have, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(have, want)


def test_dropout_repeats_with_its_seed_and_keeps_the_mean():
    q, k = randoms((1, 1, 4, 8), (1, 1, 4000, 8))
    v = torch.ones(1, 1, 4000, 1, dtype=F64)
    scoring = Scoring(scale=0.1, dropout=0.25, seed=3)
    first, lse = MATH.forward(q, k, v, None, False, scoring)
    again, _ = MATH.forward(q, k, v, None, False, scoring)
    other, _ = MATH.forward(q, k, v, None, False, Scoring(scale=0.1, dropout=0.25, seed=4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(lse, MATH.forward(q, k, v, None, False, Scoring(scale=0.1))[1])
    torch.testing.assert_close(first, torch.ones_like(first), rtol=0.05, atol=0)


@pytest.mark.parametrize("dropout", [0.3, 1.0])
def test_dropout_gradient_against_differences(dropout):
    scoring = Scoring(scale=0.7, softcap=2.0, dropout=dropout, seed=9)

    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = MATH.forward(q, k, v, None, True, scoring)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            return MATH.backward(grad, *ctx.saved_tensors, None, True, scoring)

    inputs = [t.requires_grad_() for t in randoms(*[(1, 2, 4, 3)] * 3)]
    assert torch.autograd.gradcheck(Dropped.apply, inputs)


def test_kernel_choice():
    plain = Scoring(scale=1.0)

    def choose(device, dtype, dim, *, biased=False, scoring=plain, value_dim=None):
        q, v = torch.empty(1, 2, 3, dim, dtype=dtype), torch.empty(1, 1, 3, value_dim or dim)
        with kernels.use_device(device):
            return kernels.select(q, v, biased=biased, scoring=scoring)

    half = torch.bfloat16
    assert choose("cpu", torch.float64, 5) is CPU_FLASH
    assert choose("cpu", half, 64, biased=True) is CPU_FLASH
    assert choose("cuda", half, 128) is CUDA_FLASH
    assert choose("cuda", half, 128, biased=True) is CUDA_EFFICIENT
    assert choose("cuda", torch.float32, 64) is CUDA_EFFICIENT
    assert choose("cuda", torch.float64, 64) is MATH
    assert choose("cuda", half, 12) is MATH
    assert choose("xpu", half, 64) is MATH
    for device in ("cpu", "cuda"):
        assert choose(device, half, 64, scoring=Scoring(scale=1.0, softcap=5.0)) is MATH
        assert choose(device, half, 64, scoring=Scoring(scale=1.0, dropout=0.1)) is MATH
        assert choose(device, half, 64, value_dim=32) is MATH
    assert kernels.device_type_of(torch.empty(0)) == "cpu"


# ---- attention over a prefix -----------------------------------------------------------------


def stream(q, k, v, mask, chunk_size, scoring, grad):
    """Output, log-sum-exps and gradients (q, k, v) of streamed attention, chunk by chunk."""
    chunks = partition(q.shape[2], chunk_size)
    kv = KVStream(q.shape[2])
    kv.keys, kv.values = k, v
    kv.start_gradients(len(chunks))
    plans = attention.plan(mask, chunks)
    out, lse, dq = torch.empty_like(q), q.new_empty(q.shape[:3]), torch.empty_like(q)
    for chunk, blocks in reversed(list(zip(chunks, plans, strict=True))):
        view = ChunkView(kv=kv, chunk=chunk, blocks=blocks, mask=mask)
        part, part_lse = attention.attend(q[:, :, view.span], view, scoring)
        out[:, :, view.span], lse[:, :, view.span] = part, part_lse
        dq[:, :, view.span] = attention.attend_backward(
            grad[:, :, view.span], q[:, :, view.span], part, part_lse, view, scoring
        )
    return out, lse, dq, kv.grad_keys, kv.grad_values


@pytest.mark.parametrize("key_block", [2, 8192])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 20])
@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_sdpa(name, chunk_size, key_block, monkeypatch):
    monkeypatch.setattr(attention, "KEY_BLOCK", key_block)
    make, dense = MASKS[name]
    batch_size = max(2, dense.shape[0])
    heads, kv_heads = (3, 3) if dense.shape[1] == 3 else (4, 2)
    q, grad = randoms(*[(batch_size, heads, T, 4)] * 2)
    k, v = randoms(*[(batch_size, kv_heads, T, 4)] * 2, seed=1)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    want = sdpa(*leaves, attn_mask=dense, scale=0.7, enable_gqa=heads != kv_heads)
    blind = ~dense.any(-1, keepdim=True)
    want = want.masked_fill(blind, 0)
    wanted = torch.autograd.grad(want, leaves, grad)
    with torch.no_grad():
        found, _, *grads = stream(q, k, v, make(), chunk_size, Scoring(scale=0.7), grad)
    torch.testing.assert_close(found, want.detach(), rtol=1e-12, atol=1e-12)
    for have, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["causal", "left padding", "padded window"])
def test_low_precision_attention_is_as_good_as_sdpa(name, dtype):
    """Three-way rule: against float64, no worse than SDPA in the same dtype plus half.

    For fp32, whose SDPA may be the plain formula (torch 2.8), at most twice its error.
    """
    dense = MASKS[name][1]
    batch_size = max(2, dense.shape[0])
    q, grad = randoms(*[(batch_size, 4, T, 8)] * 2)
    k, v = randoms(*[(batch_size, 2, T, 8)] * 2, seed=1)
    dense = dense | torch.eye(T, dtype=torch.bool)  # SDPA's blind rows differ between kernels
    mask = masks.DenseMask(dense)

    def run(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = sdpa(*leaves, attn_mask=dense, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    oracle, naive = run(F64), run(dtype)
    with torch.no_grad():
        inputs = [t.to(dtype) for t in (q, k, v)]
        out, _, *grads = stream(*inputs, mask, 5, Scoring(scale=8**-0.5), grad.to(dtype))
    assert out.dtype == dtype
    for have, plain, exact in zip((out, *grads), naive, oracle, strict=True):
        error, allowed = ((t.double() - exact).norm() for t in (have, plain))
        assert error <= (2 if dtype == torch.float32 else 1.5) * allowed


def test_a_soft_capped_chunk_against_the_formula():
    scoring = Scoring(scale=0.9, softcap=1.2)
    q, k, v, grad = (t.requires_grad_() for t in randoms(*[(1, 2, T, 4)] * 4))
    scores = scores_of(q, k, None, True, scoring)
    want = scores.softmax(-1) @ v
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    with torch.no_grad():
        found, lse, *grads = stream(q, k, v, None, 5, scoring, grad)
    torch.testing.assert_close(found, want.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    for have, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(have, expected)


def test_large_scores_do_not_overflow():
    """Rows that see nothing in one block, next to scores of every size."""
    q, k, v, grad = (100 * t for t in randoms(*[(2, 2, T, 4)] * 4, dtype=torch.float32))
    mask = packed(SEGMENTS)
    found, _, *grads = stream(q, k, v, mask, 3, Scoring(scale=1.0), grad)
    for t in (found, *grads):
        assert torch.isfinite(t).all()
    want = sdpa(q, k, v, attn_mask=_ISOLATED, scale=1.0)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-3)


def test_keys_changed_after_the_cache_are_refused():
    kv = KVStream(4)
    kv.begin(Chunk(0, 4))
    q, k, v = randoms(*[(1, 1, 4, 2)] * 3)
    kv.update(k, v, 0)
    view = ChunkView(kv=kv, chunk=Chunk(0, 4), blocks=masks.causal_blocks(Chunk(0, 4)), mask=None)
    module = torch.nn.Linear(1, 1)
    attention.attention_forward(module, q, k, v, view)
    with pytest.raises(ValueError, match="Linear changes its keys"):
        attention.attention_forward(module, q, k * 2, v, view)
    with pytest.raises(ValueError, match="s_aux"):
        attention.attention_forward(module, q, k, v, view, s_aux=torch.zeros(1))
    with pytest.raises(ValueError, match="outside a streamed layer"):
        attention.attention_forward(module, q, k, v, None)
    with pytest.raises(ValueError, match="more than once"):
        kv.update(k, v, 0)
    kv.begin(Chunk(0, 2))
    with pytest.raises(ValueError, match="one entry per token"):
        kv.update(k, v, 0)


def test_prefix_attention_function():
    """As the layer uses it: the chunk's own key and value receive the finished gradients."""
    q, k, v, grad = (t.requires_grad_() for t in randoms(*[(1, 2, 6, 4)] * 4))
    want = sdpa(q, k, v, is_causal=True, scale=0.5)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    kv = KVStream(6)
    kv.keys, kv.values = k.detach(), v.detach()
    kv.start_gradients(2)
    found = []
    for chunk in reversed(partition(6, 4)):
        view = ChunkView(kv=kv, chunk=chunk, blocks=masks.causal_blocks(chunk), mask=None)
        parts = [t[:, :, view.span] for t in (q, k, v)]
        out = PrefixAttention.apply(*parts, view, Scoring(scale=0.5))
        found.append(torch.autograd.grad(out, parts, grad[:, :, view.span]))
    for have, expected in zip(zip(*reversed(found), strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(have, 2), expected)
