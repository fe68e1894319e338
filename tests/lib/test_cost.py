"""What streaming computes and keeps, counted exactly: products by FLOPs, tensors by bytes.

B batch, T sequence, D hidden, F MLP width, V vocabulary, L layers, H, K heads, E head dim.
"""

import contextlib
import copy

import peft
import pytest
import torch
from libtools import VOCABULARY, assert_close, batch_of, build, gradients, in_double
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp import attention, layer
from streambp.sim.tracker import LiveTracker, register_model

aten = torch.ops.aten
B, T, D, F, L, H, K, E = 2, 48, 16, 20, 3, 4, 2, 4
PRODUCTS = (aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm_.default, aten.bmm.default)


class Counter(TorchDispatchMode):
    """Multiply-adds of matrix products by kind, and calls and score elements of attention."""

    def __init__(self):
        super().__init__()
        self.products = 0
        self.calls = {"attention": 0, "attention_backward": 0}
        self.scores = {"attention": 0, "attention_backward": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            a, b = args[-2:]
            if a.shape[-1] > 1:  # not positions times rotary frequencies
                self.products += a.numel() * b.shape[-1]
        name = func.__name__
        if "flash_attention" in name:
            backward = "backward" in name
            q, k = args[1:3] if backward else args[:2]
            rest = args[7:] if backward else args[4:]
            causal = bool(rest and rest[0])
            kind = "attention_backward" if backward else "attention"
            self.calls[kind] += 1
            pairs = q.shape[2] * k.shape[2]
            if causal:
                pairs = q.shape[2] * (q.shape[2] + 1) // 2
            self.scores[kind] += q.shape[0] * q.shape[1] * pairs
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting():
    counter = Counter()
    with counter:
        yield counter


def make(dtype=torch.float32):
    return build(num_hidden_layers=L, dtype=dtype)


def count(model):
    batch = batch_of(B, T)
    with counting() as forward:
        loss = model(**batch).loss
    with counting() as backward:
        loss.backward()
    return forward, backward


N = B * T
KV = 2 * N * D * K * E
Q = N * D * H * E
LAYER = 2 * Q + KV + 3 * N * D * F  # q and o, k and v, MLP
DOWN = N * D * F
HEAD = N * D * VOCABULARY
PAIRS = B * H * T * (T + 1) // 2


@pytest.mark.parametrize("keep_attention", [False, True])
@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("chunk_size", [5, 16, 64])
def test_products_and_attention_are_computed_as_often_as_promised(
    chunk_size, keep_kv, keep_attention
):
    """Layers: once forward, three times backward (again, and two gradients).

    But for the last product of a layer, computed again for no value that anybody reads.
    Keys and values of all chunks but the last once more unless they are kept, and with them the
    queries of the first chunk, whose graph tells that nobody reads them;
    the head three times in all; attention once forward, and once more in backward unless kept.
    """
    options = {"keep_kv": keep_kv, "keep_attention": keep_attention}
    model = streambp.enable(make(), chunk_size=chunk_size, head_chunk_size=7, **options)
    layer._unread_linear.clear()  # it is found out in time for the first chunk
    forward, backward = count(model)
    assert forward.products == L * LAYER + 3 * HEAD
    before_last = (T - 1) // chunk_size * chunk_size
    collected = 0 if keep_kv else L * (Q * min(chunk_size, before_last) + KV * before_last) // T
    assert backward.products == 3 * L * LAYER - L * DOWN + collected
    assert forward.scores["attention"] == L * PAIRS
    assert backward.scores["attention"] == (0 if keep_attention else L * PAIRS)
    assert backward.scores["attention_backward"] == L * PAIRS
    if keep_attention:
        assert backward.calls["attention"] == 0


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_against_plain_and_checkpointed_models():
    """The head costs as much as in plain training; the layers as much as with checkpointing,
    which saves itself each layer's last product.
    """
    plain = make()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    streamed = streambp.enable(copy.deepcopy(plain), chunk_size=16, keep_kv=True)
    counts = [count(model) for model in (plain, checkpointed, streamed)]
    if counts[0][0].calls["attention"] == 0:  # torch 2.8, grouped heads
        pytest.skip("attention without streaming is matrix products in this torch")
    totals = [sum(part.products for part in parts) for parts in counts]
    assert totals[0] == 3 * (L * LAYER + HEAD)
    assert totals[1] == totals[0] + L * (LAYER - N * D * F)
    assert totals[2] <= totals[0] + L * LAYER


def test_frozen_models_compute_no_weight_gradients():
    model = make()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0.self_attn.q_proj" in name)
    streambp.enable(model, chunk_size=16, keep_kv=True)
    forward, backward = count(model)
    assert forward.products == L * LAYER + 2 * HEAD
    # Computed again, gradients of inputs (of layer 0 only back to the query), one of a weight.
    upper = 2 * (L - 1) * LAYER
    assert upper < backward.products < upper + 2 * LAYER


def test_masked_blocks_only_where_the_padding_is():
    """Rows padded on the right cost what unpadded ones do."""
    model = streambp.enable(make(), chunk_size=16)
    batch = batch_of(B, T, padding="right")
    with counting() as counter:
        model(**batch)
    assert counter.scores["attention"] == L * PAIRS


def test_windows_cost_no_more_than_they_see():
    window, chunk = 8, 8
    model = build("mistral", num_hidden_layers=1, sliding_window=window, dtype=torch.float32)
    streambp.enable(model, chunk_size=chunk)
    with counting() as counter:
        model(**batch_of(1, T))
    own = H * (T // chunk) * chunk * (chunk + 1) // 2
    before = H * (T // chunk - 1) * chunk * (window - 1)
    assert counter.scores["attention"] == own + before


# ---- bytes -----------------------------------------------------------------------------------


def kept_bytes(**options):
    """By category: what lives between forward and backward, and at most in backward."""
    model = streambp.enable(make(), chunk_size=8, head_chunk_size=8, **options)
    tracker = LiveTracker()
    batch = batch_of(B, T)
    with tracker, register_model(tracker, model):
        loss = model(**batch).loss
        kept = tracker.live_by_category()
        tracker.phase = "backward"
        loss.backward()
        return kept, tracker.peaks["backward"].by_category


FLOAT = 4


def test_only_layer_inputs_are_kept():
    kept, _ = kept_bytes()
    assert kept["saved_inputs"] == L * B * T * D * FLOAT
    assert kept["hidden_grads"] == B * T * D * FLOAT  # in place of the last hidden state
    assert kept["weight_grad_buffers"] == (VOCABULARY * D + D) * FLOAT
    positions = T * E * 2 * FLOAT + T * 8  # cosine, sine, indices
    labels = B * T * 8
    assert kept["activations"] <= positions + labels + 64
    assert kept.keys() <= {
        "saved_inputs", "hidden_grads", "weight_grad_buffers", "activations", "weights",
    }  # fmt: skip


def test_keep_options_keep_what_they_say():
    base, _ = kept_bytes()
    kept, _ = kept_bytes(keep_kv=True, keep_attention=True)
    assert kept["kv"] == L * 2 * B * T * K * E * FLOAT
    assert kept["saved_attention"] == L * B * T * H * (E + 1) * FLOAT
    assert kept["saved_inputs"] == base["saved_inputs"]


def test_backward_holds_one_layer_at_a_time():
    _, peak = kept_bytes()
    assert peak["kv"] == peak["kv_grads"] == 2 * B * T * K * E * FLOAT
    assert peak["hidden_grads"] == B * T * D * FLOAT  # one buffer, written in place
    assert peak["saved_inputs"] <= L * B * T * D * FLOAT


def test_logits_exist_a_chunk_at_a_time():
    model = streambp.enable(make(), chunk_size=8, head_chunk_size=6)
    tracker = LiveTracker(timeline=True)
    with tracker:
        model(**batch_of(B, T))
    logits = tracker.timeline.to_dict()["by_category_bytes"]["logits"]
    assert 6 * VOCABULARY * FLOAT <= max(logits) <= 3 * 6 * VOCABULARY * FLOAT


def test_working_memory_does_not_grow_with_the_sequence(monkeypatch):
    """Beyond what is kept per token, a longer sequence costs nothing more."""
    monkeypatch.setattr(attention, "KEY_BLOCK", 16)

    def peak(length):
        model = streambp.enable(make(), chunk_size=16, head_chunk_size=16)
        tracker = LiveTracker()
        batch = batch_of(1, length)
        with tracker, register_model(tracker, model):
            model(**batch).loss.backward()
        return tracker.peak_bytes

    peaks = [peak(n) for n in (256, 320, 384)]
    # Layer inputs and one gradient; one layer's keys, values and their gradients; positions.
    per_token = (L * D + D + 4 * K * E + 2 * E) * FLOAT + 3 * 8
    assert peaks[2] - peaks[1] <= 64 * per_token
    assert peaks[1] - peaks[0] <= 64 * per_token


def test_a_wrong_guess_of_the_unread_product_is_made_good(monkeypatch):
    """Whatever call is guessed, gradients are exact: the graph says whether it was read."""
    model = make(torch.float64)
    plain = copy.deepcopy(model)
    with in_double():
        plain(**batch_of(B, T)).loss.backward()
        streambp.enable(model, chunk_size=5, head_chunk_size=7)
        kind = (type(model.model.layers[0]), len(list(model.model.layers[0].parameters())))
        for guess in range(7):
            monkeypatch.setitem(layer._unread_linear, kind, guess)
            model.zero_grad()
            model(**batch_of(B, T)).loss.backward()
            assert_close(gradients(model), gradients(plain))
            assert layer._unread_linear[kind] == 6  # down_proj


class ScaledByQueries(torch.nn.Module):
    """Normalises queries, then scales keys by their mean: an odd model whose keys need queries."""

    def __init__(self, query_norm, key_norm, detached):
        super().__init__()
        self.detached = detached
        self.query_norm, self.key_norm = query_norm, key_norm
        self.queries = []

    def forward(self, x):
        if x.shape[2] == H:
            self.queries[:] = [self.query_norm(x)]
            return self.queries[0]
        scale = self.queries.pop().mean(dim=(2, 3), keepdim=True)
        return self.key_norm(x) * (1 + (scale.detach() if self.detached else scale))


@pytest.mark.parametrize(
    "keys", ["scaled by queries", "scaled off the graph", "projected from queries", "tuned"]
)
def test_only_what_keys_and_values_do_not_need_is_left_out_when_they_are_collected(keys):
    """Not by its name: keys made of queries are right, adapters beside the weight are found."""
    model = make(torch.float64)
    for layer_ in model.model.layers:
        attn = layer_.self_attn
        if keys.startswith("scaled"):
            norms = ScaledByQueries(attn.q_norm, attn.k_norm, detached="off" in keys)
            attn.q_norm = attn.k_norm = norms
        elif keys == "projected from queries":
            attn.k_proj = torch.nn.Sequential(
                attn.q_proj, torch.nn.Linear(H * E, K * E, bias=False, dtype=torch.float64)
            )
    if keys == "tuned":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    plain = copy.deepcopy(model)
    layer._unread_linear.clear()
    with in_double():
        plain(**batch_of(B, T)).loss.backward()
        streambp.enable(model, chunk_size=5, head_chunk_size=7)
        _, backward = count(model)
        assert_close(gradients(model), gradients(plain))
    without = copy.deepcopy(plain)
    without.zero_grad()
    streambp.enable(without, chunk_size=5, head_chunk_size=7, keep_kv=True)
    with in_double():
        _, kept = count(without)
    extra = (backward.products - kept.products) * T // (N * L)
    queries, others = (D * H * E, D * 2 * K * E)
    expected = {
        "scaled by queries": (queries + others) * 45,
        "scaled off the graph": (queries + others) * 45,
        "projected from queries": queries * 5 + (queries + H * E * K * E + D * K * E) * 45,
        "tuned": (queries + D * 2 + 2 * H * E) * 5 + others * 45,
    }
    assert extra == expected[keys]


def test_layers_with_hooks_inside_see_every_value():
    model = streambp.enable(make(), chunk_size=16)
    model(**batch_of(B, T)).loss.backward()
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *a: seen.append(a[2].detach()))
    model(**batch_of(B, T)).loss.backward()
    half = len(seen) // 2
    for forward, again in zip(seen[:half], reversed(seen[half:]), strict=True):
        torch.testing.assert_close(forward, again)
