"""Dropout, adapters and autocast: what the backward pass computes again must be the same.

The reference runs the same chunk program under plain autograd with the same random state: the
streamed forward pass draws, chunk by chunk, what the reference draws for the chunk.
"""

import copy

import peft
import pytest
import torch
from libtools import assert_close, batch_of, build, cast, compare, double_loss, gradients, in_double

import streambp

KEEP = [{}, {"keep_kv": True}, {"keep_attention": True}, {"keep_kv": True, "keep_attention": True}]


@pytest.fixture(autouse=True)
def double():
    with in_double():
        yield


def lora(model, **fields):
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"], **fields
    )
    model = cast(peft.get_peft_model(model, config), torch.float64)
    generator = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.4
    return model.train()


def streamed_gradients(model, batch, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {k: g.clone() for k, g in gradients(model).items()}


def check_by_differences(model, batch, seed=7, step=1e-6):
    """Directional derivative of the loss at a fixed seed equals the streamed gradient."""
    _, grads = streamed_gradients(model, batch, seed)
    generator = torch.Generator().manual_seed(0)
    params = [p for p in model.parameters() if p.requires_grad]
    for chosen in (params, params[:1], params[-1:], params[len(params) // 2 :][:1]):
        directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in chosen]
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, d in zip(chosen, directions, strict=True):
                    p.add_(d, alpha=sign * step)
            torch.manual_seed(seed)
            losses.append(model(**batch).loss.detach())
            with torch.no_grad():
                for p, d in zip(chosen, directions, strict=True):
                    p.sub_(d, alpha=sign * step)
        named = {id(p): grads[n] for n, p in model.named_parameters() if p.requires_grad}
        slope = sum((named[id(p)] * d).sum() for p, d in zip(chosen, directions, strict=True))
        numeric = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(slope, numeric, rtol=2e-6, atol=2e-9)


@pytest.mark.parametrize("options", KEEP)
@pytest.mark.parametrize("chunk_size", [3, 20])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_attention_dropout(options, chunk_size, padding):
    model = build(attention_dropout=0.3)
    batch = batch_of(padding=padding)
    batch["input_ids"].clamp_(min=3)  # the pad token's embedding gets no gradient by intent
    streambp.enable(model, chunk_size=chunk_size, **options)
    check_by_differences(model, batch)
    first, grads = streamed_gradients(model, batch, 1)
    again, same = streamed_gradients(model, batch, 1)
    other, _ = streamed_gradients(model, batch, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert_close(same, grads, 1e-15)


def test_attention_dropout_is_off_in_eval():
    compare(build(attention_dropout=0.3).eval(), batch_of(), chunk_size=3)


@pytest.mark.parametrize("options", KEEP)
@pytest.mark.parametrize("also", [0.0, 0.2])
def test_adapter_dropout(options, also):
    model = lora(build(attention_dropout=also), lora_dropout=0.4)
    streambp.enable(model, chunk_size=4, **options)
    check_by_differences(model, batch_of())


def test_adapter_dropout_in_one_chunk_equals_plain_autograd():
    """With one chunk the draws come in the order of an ordinary forward pass."""
    model = lora(build(), lora_dropout=0.4)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    wanted = double_loss(plain, batch_of())
    wanted.backward()
    streambp.enable(model, chunk_size=64)
    torch.manual_seed(3)
    found = model(**batch_of()).loss
    torch.rand(5)  # the backward pass does not depend on where the generator is
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert_close(gradients(model), gradients(plain))


def test_the_backward_pass_leaves_the_generator_alone():
    model = streambp.enable(build(attention_dropout=0.3), chunk_size=4)
    loss = model(**batch_of()).loss
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", KEEP)
def test_a_kept_graph_replays_dropout(options):
    model = streambp.enable(build(attention_dropout=0.3), chunk_size=4, **options)
    loss = model(**batch_of()).loss
    grads = []
    for keep in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=keep)
        grads.append({k: g.clone() for k, g in gradients(model).items()})
    assert_close(grads[1], grads[0], 1e-15)


def test_nothing_is_kept_where_nothing_is_random():
    model = streambp.enable(build(), chunk_size=4)
    loss = model(**batch_of()).loss
    node, states = loss.grad_fn, []
    while node is not None:
        states.append(getattr(node, "random", None))
        node = next((f for f, _ in node.next_functions if f and "Streamed" in f.name()), None)
    assert len(states) == 3
    assert states == [None] * 3


# ---- adapters --------------------------------------------------------------------------------

ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "all"},
}


@pytest.mark.parametrize("which", ADAPTERS)
@pytest.mark.parametrize("options", [KEEP[0], KEEP[3]])
def test_adapters(which, options):
    model = lora(build(attention_bias=True), **ADAPTERS[which])
    compare(model, batch_of(padding="left"), chunk_size=4, head_chunk_size=5, **options)


def test_adapters_on_a_model_that_streams_already():
    base = streambp.enable(build(), chunk_size=4)
    model = lora(base)
    plain = streambp.disable(copy.deepcopy(model))
    model(**batch_of()).loss.backward()
    double_loss(plain, batch_of()).backward()
    assert_close(gradients(model), gradients(plain))


# ---- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [KEEP[0], KEEP[3]])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama"])
def test_autocast(family, options):
    """Three-way rule: against fp32, no worse than plain autocast plus a half."""
    model = build(family, dtype=torch.float32)
    exact, plain = cast(copy.deepcopy(model), torch.float64), copy.deepcopy(model)
    batch = batch_of(2, 33, padding="left")
    double_loss(exact, batch).backward()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = double_loss(plain, batch)
    wanted.backward()
    streambp.enable(model, chunk_size=8, head_chunk_size=16, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**batch).loss
    assert found.dtype == torch.float32
    found.backward()
    torch.testing.assert_close(found.double(), wanted, rtol=5e-3, atol=0)
    want = gradients(exact)
    total = torch.stack([g.norm() for g in want.values()]).norm()
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        error, allowed = (
            (g.double() - want[name]).norm() for g in (grad, plain.get_parameter(name).grad)
        )
        assert error <= 1.5 * allowed + 1e-3 * total, name


def test_autocast_leaves_float64_models_exact():
    with torch.autocast("cpu", torch.bfloat16):
        compare(build(), batch_of(), chunk_size=4)
