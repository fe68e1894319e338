"""Sums split into a resident bf16 gradient and 16 further bits: fp32 sums in half the memory."""

import copy

import pytest
import torch
from libtools import assert_close, batch_of, build, cast, compare, double_loss, gradients
from test_precision import ALLOWANCE, CHUNKS, LENGTH, errors

import streambp
from streambp import split_sum
from streambp.gradients import GradientSums, adds_in_place
from streambp.sim.tracker import LiveTracker, register_model
from streambp.split_sum import SplitSum, can_split

BF16 = torch.bfloat16


@pytest.fixture(params=[64, 2**23], ids=["blocks", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(split_sum, "BLOCK_ELEMENTS", request.param)


def small(**overrides):
    return build(dtype=BF16, max_position_embeddings=LENGTH, **overrides)


def resident(model, value=0.0):
    for p in model.parameters():
        p.grad = torch.full_like(p, value) if p.requires_grad else None
    return model


def split(model, **options):
    return streambp.enable(model, **{"chunk_size": 4, "split_sums": True, **options})


# ---- the sum itself --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 48), (1, 5), (200, 3), (6, 5, 4), (3, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_sum_is_that_of_an_fp32_tensor_bit_for_bit(block, shape, transposed):
    total = torch.randn(shape).to(BF16)
    if transposed:
        total = total.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    wide, found = total.float(), SplitSum(total)
    for step in range(20):
        change = torch.randn(shape) * 10.0 ** (step % 7 - 3)
        wide += change
        found.update(lambda part, rows, change=change: part.add_(change[rows]))
    found.finish()
    assert torch.equal(total, wide.to(BF16))


def test_special_values_survive():
    """A NaN whose upper half reads as infinity, denormals, signed zeros, the largest numbers."""
    bits = [0x7F800001, 0x00000001, -(2**31), 0x7F7FFFFF, 0x7F800000, 0x3F808000, 0x3F818000]
    values = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    total = torch.zeros(1, len(bits), dtype=BF16)
    sums = SplitSum(total)
    sums.update(lambda part, rows: part.copy_(values))
    sums.update(lambda part, rows: part.mul_(1))
    sums.finish()
    torch.testing.assert_close(total, values.to(BF16), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(total.signbit()[:, 1:], values.signbit()[:, 1:])  # a NaN's means nothing


def test_without_an_update_nothing_changes():
    total = torch.randn(3, 3).to(BF16)
    before = total.clone()
    SplitSum(total).finish()
    assert torch.equal(total, before)


def test_only_bf16_matrices_are_split():
    assert can_split(torch.zeros(2, 2, dtype=BF16))
    assert not can_split(torch.zeros(4, dtype=BF16))
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert not can_split(torch.zeros(2, 2, dtype=dtype))


# ---- gradients of models ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_bit_for_bit_the_gradients_of_fp32_sums(family):
    """Onto zeros, and with no gradient to add to: there the option changes nothing."""
    for start in (resident, lambda model: model):
        found = []
        for options in ({}, {"split_sums": True}):
            model = start(small(family=family, experts_implementation="eager"))
            streambp.enable(model, chunk_size=4, **options)
            model(**batch_of(length=21)).loss.backward()
            found.append(gradients(model))
        for name, grad in found[0].items():
            assert torch.equal(grad, found[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_unaffected_bit_for_bit(dtype):
    found = []
    for options in ({}, {"split_sums": True}):
        model = streambp.enable(resident(build(dtype=dtype), 0.5), chunk_size=4, **options)
        model(**batch_of()).loss.backward()
        found.append(gradients(model))
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def test_one_chunk_is_unaffected_bit_for_bit():
    found = []
    for options in ({}, {"split_sums": True}):
        model = streambp.enable(resident(small(), 0.5), chunk_size=100, **options)
        model(**batch_of()).loss.backward()
        found.append(gradients(model))
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


@pytest.fixture(scope="module")
def precise():
    """(bf16 model, two batches, float64 gradients of their losses' sum)."""
    model = small(hidden_size=32, head_dim=8)
    batches = [batch_of(1, LENGTH, seed=seed) for seed in (1, 2)]
    exact = cast(copy.deepcopy(model), torch.float64)
    for batch in batches:
        double_loss(exact, batch).backward()
    return model, batches, gradients(exact)


def test_the_error_does_not_grow_with_the_number_of_chunks(precise):
    """At most plain bf16's error plus a quarter, after a pass without gradients and one onto them.

    (Onto zeros, gradients are those of fp32 sums bit for bit.)
    """
    model, batches, wanted = precise
    plain = copy.deepcopy(model)
    for batch in batches:
        plain(**batch).loss.backward()
    allowed = ALLOWANCE * errors(plain, wanted)[0]
    found = {}
    for num_chunks in CHUNKS:
        model.zero_grad()
        size = LENGTH // num_chunks
        split(model, chunk_size=size, head_chunk_size=size)
        for batch in batches:
            model(**batch).loss.backward()
        found[num_chunks] = errors(model, wanted)[0]
        assert 0 < found[num_chunks] <= allowed
    few, many = (max(found[n] for n in chunks) for chunks in (CHUNKS[:2], CHUNKS[2:]))
    assert many <= 1.1 * few


def test_a_sum_without_the_lower_half_would_fail_that_rule(precise, monkeypatch):
    model, batches, wanted = precise
    found = []
    for update in (SplitSum.update, _update_and(SplitSum.finish, SplitSum.update)):
        monkeypatch.setattr(SplitSum, "update", update)
        split(resident(model), chunk_size=1)
        for batch in batches:
            model(**batch).loss.backward()
        found.append(errors(model, wanted)[0])
    assert found[1] > 1.1 * found[0]


def _update_and(finish, update):
    def both(self, change):
        update(self, change)
        finish(self)

    return both


def test_gradients_are_added_to_in_place(block):
    """And are what streaming with fp32 sums gives, but for its second rounding."""
    model, other = split(resident(small(), 0.25)), resident(small(), 0.25)
    streambp.enable(other, chunk_size=4)
    addresses = {name: g.data_ptr() for name, g in gradients(model).items()}
    for seed in (1, 2):
        for m in (model, other):
            m(**batch_of(seed=seed)).loss.backward()
    assert {name: g.data_ptr() for name, g in gradients(model).items()} == addresses
    assert_close(gradients(model), gradients(other), relative=0.005)


EXTRA = {
    "none": lambda states, weight: 0,
    "before the layers' backward": lambda states, weight: 0.1 * weight.square().sum(),
    "after it": lambda states, weight: (states[0] * weight.sum()).mean(),
    "between": lambda states, weight: (states[1] * weight.sum()).mean(),
}


@pytest.mark.parametrize("where", EXTRA)
def test_a_parameter_of_two_layers_and_twice_in_one(block, where):
    """Also beside a use outside the layers, whose share autograd adds, sooner or later."""
    found = []
    for options in ({}, {"split_sums": True}):
        model = resident(small())
        first, second = model.model.layers
        weight = first.mlp.up_proj.weight
        second.mlp.up_proj.weight = second.mlp.gate_proj.weight = weight
        streambp.enable(model, chunk_size=4, **options)
        states = []
        for module in (model.model.embed_tokens, first):
            module.register_forward_hook(lambda m, args, out, states=states: states.append(out))
        loss = model(**batch_of()).loss
        (loss + EXTRA[where](states, weight)).backward()
        found.append(gradients(model))
    assert_close(found[1], found[0], relative=0.005)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_the_whole_gradient_once(kind):
    model, other = resident(small()), split(resident(small()))
    streambp.enable(model, chunk_size=4)
    calls = []
    for name, p in other.named_parameters():
        getattr(p, kind)(lambda _, name=name: calls.append(name))
    for m in (model, other):
        m(**batch_of()).loss.backward()
    assert sorted(calls) == sorted(name for name, _ in other.named_parameters())
    assert_close(gradients(other), gradients(model), relative=0)


def test_asking_for_gradients_leaves_grad_alone():
    model = split(resident(small(), 0.5))
    names = [name for name, _ in model.named_parameters()]
    asked = torch.autograd.grad(model(**batch_of()).loss, list(model.parameters()))
    assert all((g == 0.5).all() for g in gradients(model).values())
    other = split(small())
    other(**batch_of()).loss.backward()
    assert_close(dict(zip(names, asked, strict=True)), gradients(other), relative=0)


def test_only_the_inputs_asked_for_are_added_to():
    model = split(resident(small()))
    wanted = model.model.layers[0].mlp.up_proj.weight
    model(**batch_of()).loss.backward(inputs=[wanted])
    changed = [name for name, g in gradients(model).items() if g.any()]
    assert changed == ["model.layers.0.mlp.up_proj.weight"]


def test_a_kept_graph_adds_each_time():
    model = split(resident(small()))
    loss = model(**batch_of()).loss
    loss.backward(retain_graph=True)
    once = {name: g.clone() for name, g in gradients(model).items()}
    loss.backward()
    assert_close(gradients(model), {name: 2 * g for name, g in once.items()}, relative=0.01)


def test_frozen_weights_and_adapters_in_fp32_get_what_they_would_get():
    for dtype in (torch.float32, BF16):
        found = []
        for options in ({}, {"split_sums": True}):
            model = small()
            for name, p in model.named_parameters():
                p.requires_grad_("q_proj" in name)
            adapter = torch.nn.Parameter(0.1 * torch.ones(4, 16, dtype=dtype))
            model.model.layers[0].mlp.adapter = adapter
            model.model.layers[0].mlp.register_forward_hook(
                lambda module, args, out: out + (args[0].to(module.adapter.dtype)
                    @ module.adapter.t() @ module.adapter).to(out.dtype)
            )  # fmt: skip
            streambp.enable(resident(model), chunk_size=4, **options)
            model(**batch_of()).loss.backward()
            found.append(gradients(model))
        assert_close(found[1], found[0], relative=0)


def test_with_keep_options_and_a_recomputed_head():
    options = {"keep_kv": True, "keep_attention": True, "recompute_head": True, "split_sums": True}
    compare(build(), batch_of(), chunk_size=4, head_chunk_size=3, **options)


def test_sums_take_two_bytes_a_parameter(monkeypatch):
    monkeypatch.setattr(split_sum, "BLOCK_ELEMENTS", 2**10)
    peaks = {}
    for options in ({}, {"split_sums": True}):
        model = resident(small(hidden_size=64, intermediate_size=256, num_hidden_layers=1))
        streambp.enable(model, chunk_size=8, **options)
        matrices = [p for p in model.model.layers[0].parameters() if p.ndim > 1]
        tracker = LiveTracker()
        with tracker, register_model(tracker, model):
            loss = model(**batch_of(1, 32)).loss
            tracker.phase = "backward"
            loss.backward(inputs=matrices)
        by_category = tracker.peaks["backward"].by_category
        peaks[bool(options)] = by_category["weight_grad_buffers"]
    num_elements = sum(p.numel() for p in matrices)
    assert 4 * num_elements <= peaks[False]
    assert 2 * num_elements <= peaks[True] <= 2 * num_elements + 8 * 2**10


def test_sums_without_a_resident_gradient_are_handed_over():
    leaf = torch.zeros(3, 2, dtype=BF16)
    total = torch.ones(3, 2, dtype=BF16)
    grad = torch.full((5, 3), 2.0, dtype=BF16)
    x = torch.ones(5, 2, dtype=BF16)
    for resident_ in (None, total):
        sums = GradientSums([leaf], 2, [resident_])
        for _ in range(2):
            sums.add_product(leaf, grad, x)
            sums.add(leaf, leaf + 1)
        (found,) = sums.take()
        if resident_ is None:
            assert (found == 22).all()
        else:
            assert found is None and (total == 23).all()


def test_a_parameter_outside_a_backward_pass_is_not_added_to():
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=BF16))
    p.grad = torch.zeros_like(p)
    assert not adds_in_place(p)
