"""What autograd sees of the streamed pass: hooks, partial gradients, kept graphs, buffers."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from libtools import assert_close, batch_of, build, double_loss, gradients, in_double

import streambp
from streambp.sim.tracker import LiveTracker

KEEP = [{}, {"keep_kv": True, "keep_attention": True}, {"recompute_head": True}]


@pytest.fixture(autouse=True)
def double():
    with in_double():
        yield


@pytest.fixture
def models():
    """(plain, streamed) with equal weights."""
    model = build()
    return copy.deepcopy(model), streambp.enable(model, chunk_size=4, head_chunk_size=5)


def inner_states(model):
    """Forward hooks that collect the output of embedding and layers, still in the graph."""
    states = []

    def keep(module, args, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    for module in (model.model.embed_tokens, *model.model.layers):
        module.register_forward_hook(keep)
    return states


def test_post_accumulate_hooks_fire_once_with_the_whole_gradient(models):
    plain, model = models
    counts = {name: 0 for name, _ in model.named_parameters()}
    seen = {}

    def count(name):
        def hook(p):
            counts[name] += 1
            seen[name] = p.grad.clone()

        return hook

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(count(name))
    model(**batch_of()).loss.backward()
    double_loss(plain, batch_of()).backward()
    assert set(counts.values()) == {1}
    assert_close(seen, gradients(plain))


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_hooks_of_parameters_see_the_whole_gradient_once(tied):
    model = build(tie_word_embeddings=tied)
    plain = copy.deepcopy(model)
    streambp.enable(model, chunk_size=3, head_chunk_size=4)
    seen = {name: [] for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        p.register_hook(seen[name].append)
    model(**batch_of()).loss.backward()
    double_loss(plain, batch_of()).backward()
    assert {len(grads) for grads in seen.values()} == {1}
    assert_close({name: grads[0] for name, grads in seen.items()}, gradients(plain))


def test_a_hook_may_replace_the_gradient(models):
    plain, model = models
    for m in models:
        m.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: 3 * g)
    model(**batch_of()).loss.backward()
    double_loss(plain, batch_of()).backward()
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("options", KEEP)
def test_autograd_grad_of_parameters(models, options):
    plain, model = models
    streambp.enable(model, chunk_size=4, **options)
    for names in (["lm_head.weight"], ["model.embed_tokens.weight", "model.norm.weight"], None):
        wanted, found = {}, {}
        for m, loss, out in (
            (plain, double_loss(plain, batch_of()), wanted),
            (model, model(**batch_of()).loss, found),
        ):
            params = dict(m.named_parameters())
            chosen = names or list(params)
            grads = torch.autograd.grad(loss, [params[name] for name in chosen])
            out.update(zip(chosen, grads, strict=True))
        assert_close(found, wanted)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("folded", [True, False])
def test_gradients_of_inner_states_that_somebody_waits_for(models, folded):
    """Buffers are reused in place, but never one that somebody else holds."""
    plain, model = models
    model.__dict__["_streambp"].fold_norm = folded
    wanted_states, states = inner_states(plain), inner_states(model)
    wanted = torch.autograd.grad(double_loss(plain, batch_of()), wanted_states)
    found = torch.autograd.grad(model(**batch_of()).loss, states)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-14)


STORE = {
    "itself": lambda g: g,
    "detached": lambda g: g.detach(),
    "view": lambda g: g[0],
    "storage": lambda g: torch.empty(0, dtype=g.dtype).set_(g.untyped_storage()),
    "numpy": lambda g: g.numpy(),
}


@pytest.mark.parametrize("how", STORE)
def test_hooks_may_store_gradients_of_inner_states(models, how):
    plain, model = models
    wanted, stored, copies = [], [], []

    def store(g):
        stored.append(STORE[how](g))
        copies.append(g.clone())

    for m in models:
        states = inner_states(m)
        loss = double_loss(m, batch_of()) if m is plain else m(**batch_of()).loss
        for state in states:
            state.register_hook(wanted.append if m is plain else store)
        loss.backward()
    for have, kept, want in zip(stored, copies, wanted, strict=True):
        torch.testing.assert_close(kept, want, rtol=1e-10, atol=1e-14)
        assert torch.equal(
            torch.as_tensor(have).flatten(), (kept[0] if how == "view" else kept).flatten()
        )
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("how", STORE)
def test_forward_hooks_may_store_inner_states(models, how):
    """The loss writes its gradient over the last hidden state only if nobody else has it."""
    _, model = models
    stored, copies = [], []

    def store(module, args, output):
        stored.append(STORE[how](output.detach() if how == "numpy" else output))
        copies.append(output.detach().clone())

    for layer in model.model.layers:
        layer.register_forward_hook(store)
    model(**batch_of()).loss.backward()
    for have, kept in zip(stored, copies, strict=True):
        have = torch.as_tensor(have).detach()
        assert torch.equal(have.flatten(), (kept[0] if how == "view" else kept).flatten())


def test_retained_gradients_of_inner_states(models):
    plain, _ = models
    grads = []
    for m in models:
        states = inner_states(m)
        loss = double_loss(m, batch_of()) if m is plain else m(**batch_of()).loss
        for state in states:
            state.retain_grad()
        loss.backward()
        grads.append([state.grad for state in states])
    for have, want in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-14)


def test_a_second_loss_on_inner_states(models):
    """Two gradients meet at an inner state, whichever comes first."""
    plain, model = models
    for m in models:
        states = inner_states(m)
        loss = double_loss(m, batch_of()) if m is plain else m(**batch_of()).loss
        for state in states:
            loss = loss + 0.1 * state.square().mean() + 0.2 * state[:, 3:5].sum()
        loss.backward()
    assert_close(gradients(model), gradients(plain))


def test_a_residual_around_layers(models):
    """One gradient tensor goes to two consumers: neither may overwrite it for the other."""
    plain, model = models
    for m in models:
        kept = {}
        m.model.embed_tokens.register_forward_hook(
            lambda module, args, out, kept=kept: kept.update(x=out)
        )
        m.model.layers[-1].register_forward_hook(
            lambda module, args, out, kept=kept: out + kept["x"]
        )
        loss = double_loss(m, batch_of()) if m is plain else m(**batch_of()).loss
        loss.backward()
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("options", KEEP)
def test_a_kept_graph_gives_the_same_gradients_again(models, options):
    plain, model = models
    streambp.enable(model, chunk_size=4, **options)
    double_loss(plain, batch_of()).backward()
    loss = model(**batch_of()).loss
    for keep in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=keep)
        assert_close(gradients(model), gradients(plain))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_kept_gradients_accumulate(models):
    plain, model = models
    loss = model(**batch_of()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * double_loss(plain, batch_of())).backward()
    assert_close(gradients(model), gradients(plain))


def test_double_backward_raises(models):
    _, model = models
    params = list(model.parameters())
    grads = torch.autograd.grad(model(**batch_of()).loss, params, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(sum(g.sum() for g in grads), params)


def test_several_forwards_before_one_backward(models):
    plain, model = models
    batches = [batch_of(seed=s, length=n) for s, n in ((1, 5), (2, 13), (3, 8))]
    sum(s * double_loss(plain, b) for s, b in enumerate(batches, 1)).backward()
    sum(s * model(**b).loss for s, b in enumerate(batches, 1)).backward()
    assert_close(gradients(model), gradients(plain))


def test_backward_in_another_thread(models):
    plain, model = models
    double_loss(plain, batch_of()).backward()
    loss = model(**batch_of()).loss
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_close(gradients(model), gradients(plain))


def test_settings_changed_between_forward_and_backward(models):
    plain, model = models
    double_loss(plain, batch_of()).backward()
    loss = model(**batch_of()).loss
    streambp.enable(model, chunk_size=2)
    other = model(**batch_of()).loss
    streambp.disable(model)
    loss.backward()
    assert_close(gradients(model), gradients(plain))
    model.zero_grad()
    other.backward()
    assert_close(gradients(model), gradients(plain))


def test_saved_tensor_hooks_see_what_is_saved(models):
    plain, model = models
    double_loss(plain, batch_of()).backward()
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**batch_of()).loss
    loss.backward()
    assert packed.count((2, 13, 16)) >= 2
    assert_close(gradients(model), gradients(plain))


# ---- nothing stays alive ---------------------------------------------------------------------


def live_tensors():
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        tensors = [
            t for t in found if torch._C._has_storage(t)
        ]  # torch 2.8 also lists undefined ones
        return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("options", KEEP)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_no_growth_over_steps(models, options, padding):
    _, model = models
    streambp.enable(model, chunk_size=4, **options)
    live = []
    for step in range(20):
        batch = batch_of(seed=step, padding=padding)
        model(**batch).loss.backward()
        model.zero_grad()
        del batch
        if step in (1, 19):
            live.append(live_tensors())
    assert live[1][0] <= live[0][0]
    assert live[1][1] <= live[0][1]


@pytest.mark.parametrize("options", KEEP)
def test_the_graph_dies_with_the_loss_and_without_the_garbage_collector(models, options):
    _, model = models
    streambp.enable(model, chunk_size=4, **options)
    gc.collect()
    gc.disable()
    try:
        for finish in (lambda loss: loss.backward(), lambda loss: None):
            graph = []
            for layer in model.model.layers:
                layer.register_forward_hook(
                    lambda m, a, out, graph=graph: graph.append(weakref.ref(out.grad_fn))
                )
            loss = model(**batch_of(padding="left")).loss
            finish(loss)
            del loss
            assert [ref() for ref in graph] == [None, None]
    finally:
        gc.enable()


def test_backward_frees_what_it_kept():
    """Before the loss goes, and without the garbage collector."""
    model = streambp.enable(build(), chunk_size=4, keep_kv=True, keep_attention=True)
    tracker = LiveTracker()
    batch = batch_of()
    gc.collect()
    gc.disable()
    try:
        with tracker:
            loss = model(**batch).loss
            kept = tracker.live_by_category()
            loss.backward()
            left = tracker.live_by_category()
    finally:
        gc.enable()
    assert {"saved_inputs", "kv", "saved_attention"} <= kept.keys()
    assert not {"saved_inputs", "kv", "saved_attention", "kv_grads", "logits"} & left.keys()
