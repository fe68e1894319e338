"""Models that look at values which streaming would rather not compute stay exact.

T sequence. Every one is compared with plain autograd in float64.
"""

import functools

import pytest
import torch
from libtools import batch_of, build, compare
from torch.nn import functional as F

T = 20


class Queries(torch.nn.Linear):
    """A query projection that also leaves something for the keys in `seen`."""

    how = ""
    seen: list

    def forward(self, x):
        out = super().forward(x)
        if self.how == "equal":
            self.seen[:] = [1.0 if torch.equal(out, out * 0) else 3.0]
        elif self.how == "item":
            self.seen[:] = [1 + out.abs().mean().item()]
        elif self.how == "without grad":
            with torch.no_grad():
                buffer = torch.empty(out.shape, dtype=out.dtype)
                buffer[:] = out
            self.seen[:] = [1 + buffer.abs().mean(-1, keepdim=True)]
        elif self.how == "index":
            self.seen[:] = [1 + out.argmax(-1, keepdim=True)]
        return out


class Keys(torch.nn.Linear):
    queries: list

    def forward(self, x):
        return super().forward(x) * self.queries[0].seen.pop()


@pytest.mark.parametrize("how", ["equal", "item", "without grad", "index"])
def test_keys_that_need_the_values_of_queries_off_the_graph(how):
    model = build("llama")
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.__class__, attention.k_proj.__class__ = Queries, Keys
        attention.q_proj.how, attention.q_proj.seen = how, []
        attention.k_proj.queries = [attention.q_proj]  # in a list: no submodule
    if how == "item":  # a mean over a chunk is another model; over one token it is the same
        compare(model, batch_of(1, 1), chunk_size=1)
    else:
        compare(model, batch_of(2, T), chunk_size=4)


def test_a_layer_that_projects_more_in_its_first_chunk():
    model = build("llama", num_key_value_heads=4)
    for layer in model.model.layers:
        attention = layer.self_attn
        original = type(attention).forward

        class Attention(type(attention)):
            def forward(self, hidden_states, *args, _original=original, **kwargs):
                cache = kwargs.get("cache", kwargs.get("past_key_values"))
                if cache is None or cache.get_seq_length(self.layer_idx) == 0:
                    first = hidden_states[:, :1] + F.linear(hidden_states[:, :1], self.extra)
                    hidden_states = torch.cat([first, hidden_states[:, 1:]], 1)
                return _original(self, hidden_states, *args, **kwargs)

        attention.__class__ = Attention
        attention.extra = torch.nn.Parameter(torch.randn(16, 16, dtype=torch.float64) * 0.1)
    compare(model, batch_of(2, T), chunk_size=4)


class Clamped(torch.nn.Linear):
    """As models do that may overflow in fp16: it clamps only where its values call for it."""

    def forward(self, x):
        out = super().forward(x)
        return out.clamp(-0.5, 0.5) if (out.abs() > 0.5).any() else out


@pytest.mark.parametrize("where", ["product", "sum"])
def test_a_last_product_whose_values_decide_what_follows(where):
    model = build("llama")
    for layer in model.model.layers:
        if where == "product":
            layer.mlp.down_proj.__class__ = Clamped
            continue
        original = type(layer).forward

        class Layer(type(layer)):
            @functools.wraps(original)
            def forward(self, *args, _original=original, **kwargs):
                out = _original(self, *args, **kwargs)
                return out.clamp(-2, 2) if (out.detach().abs() > 2).any() else out

        layer.__class__ = Layer
    compare(model, batch_of(1, T), chunk_size=1)


def test_a_hook_on_every_module_sees_every_value():
    model = build("qwen3")
    watched, seen = model.model.layers[0].mlp.down_proj, []

    def note(module, _, out):
        if module is watched:
            seen.append(bool(out.any()))

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        compare(model, batch_of(2, T), chunk_size=4)
    finally:
        handle.remove()
    assert len(seen) == 2 * T // 4 and all(seen)
