"""The head differentiated by vocabulary blocks: exact, and never a second tensor of its size."""

import pytest
import torch
from libtools import assert_close, batch_of, build, compare, gradients, in_double

import streambp
from streambp import blocked_head
from streambp.sim.tracker import LiveTracker

OPTIONS = {"chunk_size": 4, "head_chunk_size": 3, "recompute_head": True}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """31 vocabulary entries in blocks of 8, the last one ragged."""
    monkeypatch.setattr(blocked_head, "VOCABULARY_BLOCK", 8)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_exact(family, tied, padding):
    batch = batch_of(2, 13, padding=padding, ignored=0.3)
    compare(build(family, tie_word_embeddings=tied), batch, upstream=-3.0, **OPTIONS)


@pytest.mark.parametrize("head_chunk_size", [1, 5, 100])
def test_exact_for_any_chunk(head_chunk_size):
    options = {**OPTIONS, "head_chunk_size": head_chunk_size}
    compare(build(), batch_of(1, 17) | {"num_items_in_batch": 5}, **options)


def test_all_labels_ignored():
    model = streambp.enable(build(), **OPTIONS)
    batch = batch_of(1, 9)
    batch["labels"].fill_(-100)
    loss = model(**batch).loss
    loss.backward()
    assert loss == 0
    assert all((g == 0).all() for g in gradients(model).values())


@pytest.mark.parametrize("overrides", [{"final_logit_softcapping": 5.0}, {}])
def test_heads_that_are_more_than_a_matrix_take_the_other_way(overrides):
    family = "gemma2" if overrides else "gemma3"
    compare(build(family, **overrides), batch_of(1, 9), **OPTIONS)


def test_frozen_head_and_frozen_norm():
    model = build()
    model.lm_head.weight.requires_grad_(False)
    compare(model, batch_of(1, 9), **OPTIONS)
    model = build()
    model.model.norm.weight.requires_grad_(False)
    compare(model, batch_of(1, 9), **OPTIONS)


def test_gradients_add_onto_existing_ones_in_place():
    model = streambp.enable(build(), **OPTIONS)
    batch = batch_of(1, 11)
    with in_double():
        model(**batch).loss.backward()
        once = {name: g.clone() for name, g in gradients(model).items()}
        address = model.lm_head.weight.grad.data_ptr()
        model(**batch).loss.backward()
    assert model.lm_head.weight.grad.data_ptr() == address
    assert_close(gradients(model), {name: 2 * g for name, g in once.items()})


def test_asking_for_gradients_leaves_grad_alone():
    model = streambp.enable(build(), **OPTIONS)
    batch = batch_of(1, 11)
    with in_double():
        model(**batch).loss.backward()
        before = {name: g.clone() for name, g in gradients(model).items()}
        loss = model(**batch).loss
        names = [name for name, _ in model.named_parameters()]
        asked = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert_close(dict(zip(names, asked, strict=True)), before)
        assert_close(gradients(model), before, relative=0)
        loss.backward()
    assert_close(gradients(model), {name: 2 * g for name, g in before.items()})


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_the_gradient_once(kind):
    model = streambp.enable(build(), **OPTIONS)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    calls = []
    getattr(model.lm_head.weight, kind)(lambda _: calls.append(1))
    model(**batch_of(1, 11)).loss.backward()
    assert calls == [1]


def test_bf16_head_gradient_is_summed_in_fp32():
    model = build(dtype=torch.bfloat16)
    batch = batch_of(1, 120)
    exact = build(dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    with in_double():
        exact(**batch).loss.backward()
    wanted = exact.lm_head.weight.grad
    errors = []
    for size in (1, 120):
        model.zero_grad()
        streambp.enable(model, **{**OPTIONS, "chunk_size": 120, "head_chunk_size": size})
        model(**batch).loss.backward()
        found = model.lm_head.weight.grad.double()
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    assert errors[0] <= 1.1 * errors[1]


def test_no_second_tensor_of_the_heads_size():
    model = build(vocab_size=4000, dtype=torch.float32)
    blocked_head.VOCABULARY_BLOCK = 400
    streambp.enable(model, chunk_size=8, head_chunk_size=2, recompute_head=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tracker = LiveTracker()
    for name, p in model.named_parameters():
        tracker.register(p, "weights", name)
        tracker.register(p.grad, "gradients", name)
    resident = tracker.live_bytes
    with tracker:
        loss = model(**batch_of(1, 16)).loss
        tracker.reset_peak()
        loss.backward(inputs=[model.lm_head.weight, model.model.norm.weight])
    head_bytes = model.lm_head.weight.numel() * 4
    assert tracker.peak_bytes - resident < head_bytes / 2
