"""What `enable` promises about the model around the streamed pass, and what it refuses."""

import copy
import inspect
import io
import pickle
import random

import pytest
import torch
import transformers
from libtools import (
    assert_close,
    batch_of,
    build,
    compare,
    config_of,
    double_loss,
    gradients,
    in_double,
    randomised,
)

import streambp
from streambp import StreamConfig


def instance_state(model):
    """Every module's own attributes apart from its tables of parameters and children."""
    tables = ("_parameters", "_buffers", "_modules")
    return {
        name: {k: v for k, v in module.__dict__.items() if k not in tables}
        for name, module in model.named_modules()
    }


@pytest.fixture
def model():
    return build(dtype=torch.float32)


def ids(length=9, batch_size=2):
    return batch_of(batch_size, length)["input_ids"]


# ---- enable and disable ----------------------------------------------------------------------


def test_enable_returns_the_model_and_disable_restores_everything(model):
    before = instance_state(model)
    before_config = model.config.to_dict()
    assert streambp.enable(model, chunk_size=3) is model
    assert instance_state(model) != before
    model(**batch_of()).loss.backward()
    assert streambp.disable(model) is model
    assert instance_state(model) == before
    assert model.config.to_dict() == before_config
    model.zero_grad()
    assert model(**batch_of()).logits is not None


def test_disable_of_a_model_that_never_streamed(model):
    before = instance_state(model)
    streambp.disable(model)
    assert instance_state(model) == before


def test_enabling_again_changes_the_settings():
    model = build()
    streambp.enable(model, chunk_size=3)
    compare(streambp.disable(streambp.enable(model, chunk_size=5)), batch_of(), chunk_size=7)


def test_settings_as_an_object_or_as_keywords(model):
    streambp.enable(model, StreamConfig(chunk_size=3, keep_kv=True))
    streambp.enable(model, config=StreamConfig())
    with pytest.raises(ValueError, match="not both"):
        streambp.enable(model, StreamConfig(), chunk_size=3)
    with pytest.raises(ValueError, match="StreamConfig"):
        streambp.enable(model, {"chunk_size": 3})
    with pytest.raises(ValueError, match=r"'chunks'.*chunk_size"):
        streambp.enable(model, chunks=3)


@pytest.mark.parametrize("field", ["chunk_size", "head_chunk_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_chunk_sizes_below_one_or_not_whole(field, value):
    with pytest.raises(ValueError, match=field):
        StreamConfig(**{field: value})


def test_other_settings_are_checked():
    with pytest.raises(ValueError, match="keep_kv"):
        StreamConfig(keep_kv=1)
    with pytest.raises(ValueError, match="keep_attention"):
        StreamConfig(keep_attention="yes")
    with pytest.raises(ValueError, match="split_sums"):
        StreamConfig(split_sums=1)
    with pytest.raises(ValueError, match="offload='moon'"):
        StreamConfig(offload="moon")


def test_a_refused_setting_leaves_the_model_alone(model):
    before = instance_state(model)
    with pytest.raises(ValueError, match="chunk_size"):
        streambp.enable(model, chunk_size=0)
    assert instance_state(model) == before


def test_another_instance_is_unaffected_even_with_the_same_config():
    config = config_of("qwen3")
    first, second = (
        randomised(transformers.Qwen3ForCausalLM(config), seed, torch.float32) for seed in (0, 1)
    )
    before = instance_state(second)
    wanted = second(**batch_of()).logits
    streambp.enable(first, chunk_size=4)
    first(**batch_of()).loss.backward()
    assert instance_state(second) == before
    found = second(**batch_of())
    assert torch.equal(found.logits, wanted)
    loss = first(**batch_of()).loss
    found.loss.backward()
    loss.backward()
    assert second.config._attn_implementation == "sdpa"
    # One streams inside the other: the shared configuration is switched only around the layers.
    handle = first.model.layers[0].register_forward_hook(
        lambda *_: (
            (torch.equal(second(**batch_of()).logits, wanted) or pytest.fail("changed")) and None
        )
    )
    with torch.no_grad():
        first(**batch_of())
    handle.remove()


def test_an_error_inside_leaves_streaming_usable(model):
    streambp.enable(model, chunk_size=4)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch_of())
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=ids()).logits is not None
    model(**batch_of()).loss.backward()


# ---- copies and files ------------------------------------------------------------------------


def test_a_deep_copy_streams_on_its_own_model():
    model = streambp.enable(build(), chunk_size=4)
    plain = streambp.disable(copy.deepcopy(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.layers[0].mlp.up_proj.weight.zero_()
    with in_double():
        double_loss(plain, batch_of()).backward()
        output = twin(**batch_of())
        assert output.logits is None
        output.loss.backward()
    assert_close(gradients(twin), gradients(plain))
    assert all(p.grad is None for p in model.parameters())
    streambp.disable(twin)
    assert model(**batch_of()).logits is None


def test_names_state_and_files_are_unchanged(model, tmp_path):
    names = [name for name, _ in model.named_parameters()]
    modules = [name for name, _ in model.named_modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    signature = inspect.signature(model.forward)
    streambp.enable(model, chunk_size=4)
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_modules()] == modules
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert inspect.signature(model.forward) == signature
    assert type(model) is transformers.Qwen3ForCausalLM
    model.save_pretrained(tmp_path)
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(v, state[k]) for k, v in loaded.state_dict().items())
    assert "streambp" not in (tmp_path / "config.json").read_text()
    assert loaded(**batch_of()).logits is not None
    model.load_state_dict(state)


def test_a_pickled_model_computes_the_same(model):
    streambp.enable(model, chunk_size=4)
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    buffer.seek(0)
    twin = pickle.load(buffer)
    twin(**batch_of()).loss.backward()
    model(**batch_of()).loss.backward()
    assert_close(gradients(twin), gradients(model), 1e-5)
    streambp.disable(twin)
    assert streambp.enable(twin)(**batch_of()).logits is None


# ---- calls that do not stream ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_without_gradients_the_original_result_bit_for_bit(family):
    model = build(family, dtype=torch.float32)
    batch = batch_of(padding="left")
    with torch.no_grad():
        wanted = model(**batch)
        wanted_last = model(input_ids=batch["input_ids"], logits_to_keep=1).logits
    streambp.enable(model, chunk_size=3)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = model(**batch)
            assert torch.equal(found.logits, wanted.logits)
            assert torch.equal(found.loss, wanted.loss)
            last = model(input_ids=batch["input_ids"], logits_to_keep=1).logits
            assert torch.equal(last, wanted_last)
            states = model(**batch, output_hidden_states=True).hidden_states
            assert len(states) == 3


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_generate_gives_the_original_tokens(model, options):
    model.eval()
    wanted, found = None, None
    kwargs = {"max_new_tokens": 6, "pad_token_id": 0, **options}
    torch.manual_seed(0)
    wanted = model.generate(ids(), **kwargs)
    streambp.enable(model, chunk_size=3)
    torch.manual_seed(0)
    found = model.generate(ids(), **kwargs)
    assert torch.equal(found, wanted)


def test_with_a_cache_the_original_path_runs(model):
    wanted = model(**batch_of(), use_cache=True)
    streambp.enable(model, chunk_size=3)
    found = model(**batch_of(), use_cache=True)
    assert torch.equal(found.logits, wanted.logits)
    cache = getattr(found, "cache", None) or found.past_key_values
    assert cache.get_seq_length() == 13
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    assert model(input_ids=ids(1), **{name: cache}).logits.shape == (2, 1, 31)


def test_without_labels_layers_stream_and_logits_come_out():
    model = build()
    plain = copy.deepcopy(model)
    streambp.enable(model, chunk_size=4)
    batch = batch_of()
    labels = batch.pop("labels")
    with in_double():
        wanted, output = plain(**batch).logits, model(**batch)
        torch.testing.assert_close(output.logits, wanted, rtol=1e-10, atol=1e-12)
        for logits in (wanted, output.logits):
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    assert_close(gradients(model), gradients(plain))


def test_logits_to_keep_returns_logits(model):
    wanted = model(**batch_of(), use_cache=False).logits[:, -3:]
    streambp.enable(model, chunk_size=4)
    output = model(input_ids=batch_of()["input_ids"], logits_to_keep=3)
    torch.testing.assert_close(output.logits, wanted, rtol=1e-4, atol=1e-5)


def test_the_base_model_alone_streams():
    base = build().model
    plain = copy.deepcopy(base)
    streambp.enable(base, chunk_size=4)
    with in_double():
        for m in (base, plain):
            m(input_ids=ids()).last_hidden_state.square().sum().backward()
    assert_close(gradients(base), gradients(plain))


def test_return_dict_false(model):
    streambp.enable(model, chunk_size=4)
    wanted = model(**batch_of()).loss
    (loss,) = model(**batch_of(), return_dict=False)
    assert torch.equal(loss, wanted)
    assert torch.equal(model(**batch_of())[0], wanted)


def test_arguments_by_position(model):
    streambp.enable(model, chunk_size=4)
    batch = batch_of(padding="left")
    by_position = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    assert torch.equal(by_position, model(**batch).loss)


def test_eval_mode_with_gradients_streams():
    compare(build().eval(), batch_of(), chunk_size=4)


# ---- gradient checkpointing ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_left_on_is_harmless(when, reentrant):
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model = build()
    if when == "before":
        model.gradient_checkpointing_enable(**kwargs)

    def enable(model, **options):
        streambp.enable(model, **options)
        if when == "after":
            model.gradient_checkpointing_enable(**kwargs)

    compare(model, batch_of(padding="left"), chunk_size=4, enable=enable)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


# ---- hooks on modules ------------------------------------------------------------------------


def test_module_hooks_on_layers_see_the_whole_sequence_once(model):
    streambp.enable(model, chunk_size=4)
    shapes, grads = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda m, args: shapes.append(tuple(args[0].shape)))
        layer.register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape)))
        layer.register_full_backward_hook(lambda m, gin, gout: grads.append(tuple(gout[0].shape)))
    model(**batch_of()).loss.backward()
    assert shapes == [(2, 13, 16)] * 4
    assert grads == [(2, 13, 16)] * 2


def test_forward_hooks_may_change_what_flows():
    """As DDP, FSDP and adapters do; the same hooks run on both models."""
    model = build()
    model.model.layers[0].register_forward_hook(lambda m, args, out: out * 1.5)
    model.model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] + 0.1, *args[1:]))
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: out - 0.3)
    compare(model, batch_of(), chunk_size=4)


def test_hooks_on_the_final_norm_and_the_base_model_see_the_normed_states():
    plain = build()
    model = streambp.enable(copy.deepcopy(plain), chunk_size=4)
    batch = batch_of()
    seen = {}
    with in_double():
        for name, m in (("plain", plain), ("streamed", model)):
            hook = lambda mod, args, out, n=name: seen.setdefault(n, []).append(out)  # noqa: E731
            handles = [m.model.norm.register_forward_hook(hook)]
            (m(**batch).loss if m is model else double_loss(m, batch)).backward()
            handles.append(
                m.model.register_forward_hook(lambda mod, args, out, h=hook: h(mod, args, out[0]))
            )
            m(**batch)
            for handle in handles:
                handle.remove()
        for have, want in zip(seen["streamed"], seen["plain"], strict=True):
            torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)
        assert_close(gradients(model), gradients(plain))
    model.zero_grad()
    compare(streambp.disable(model), batch, chunk_size=4)


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", ["output_attentions", "output_hidden_states"])
def test_requests_for_inner_states_are_refused(request_):
    model = streambp.enable(build(attn_implementation="eager"), chunk_size=4)
    with pytest.raises(ValueError, match=request_):
        model(**batch_of(), **{request_: True})
    setattr(model.config, request_, True)
    with pytest.raises(ValueError, match=request_):
        model(**batch_of())


def test_bidirectional_masks_are_refused():
    model = streambp.enable(build(), chunk_size=4)
    full = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    one = full.tril()
    one[1, 0, 5, 6] = True
    for mask in (full, one, torch.zeros(2, 1, 13, 13).double()):
        with pytest.raises(ValueError, match="later tokens"):
            model(**{**batch_of(), "attention_mask": mask})


def test_masks_of_the_wrong_shape_are_refused():
    model = streambp.enable(build(), chunk_size=4)
    for shape in ((2, 1, 13, 20), (2, 1, 1, 13), (2, 13, 13), (2, 1, 9, 9), (2, 9), (2, 20)):
        mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match="attention"):
            model(**{**batch_of(), "attention_mask": mask.tril() if mask.ndim > 2 else mask})


def test_masks_with_gradients_are_refused():
    model = streambp.enable(build(), chunk_size=4)
    mask = torch.zeros(1, 1, 13, 13).fill_(-1e9).triu(1).double().requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        model(**{**batch_of(), "attention_mask": mask})


def test_bidirectional_models_are_refused():
    for cls, config in (
        (transformers.BertModel, transformers.BertConfig),
        (transformers.ModernBertModel, transformers.ModernBertConfig),
    ):
        fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "intermediate_size": 16, "vocab_size": 31, "pad_token_id": 0}  # fmt: skip
        with pytest.raises(ValueError, match=rf"{cls.__name__}.*(stream|layers)"):
            streambp.enable(cls(config(**fields)))
    for fields in ({"is_causal": False}, {"use_bidirectional_attention": True}):
        model = build("gemma3")
        for name, value in fields.items():
            setattr(model.config, name, value)
        with pytest.raises(ValueError, match="bidirectional"):
            streambp.enable(model)
    model = build()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="bidirectional"):
        streambp.enable(model)


def test_other_models_are_refused_by_name():
    with pytest.raises(ValueError, match="Linear is not a Hugging Face model"):
        streambp.enable(torch.nn.Linear(2, 2))
    t5 = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=31
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        streambp.enable(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ValueError, match="auxiliary loss"):
        streambp.enable(build("qwen3_moe", output_router_logits=True))
    moe = streambp.enable(build("qwen3_moe"), chunk_size=4)
    with pytest.raises(ValueError, match="output_router_logits"):
        moe(**batch_of(), output_router_logits=True)


def test_a_head_that_changes_its_logits_is_refused():
    class Doubled(transformers.Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    with pytest.raises(ValueError, match="changes its logits"):
        streambp.enable(Doubled(config_of("qwen3")))


def test_a_foreign_loss_is_refused():
    model = streambp.enable(build(), chunk_size=4)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="loss function"):
        model(**batch_of())


def test_a_replaced_forward_is_refused(model):
    model.model.layers[0].forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="replaced"):
        streambp.enable(model)


def test_random_order_of_enable_and_disable_never_breaks(model):
    generator = random.Random(0)
    before = instance_state(model)
    for _ in range(20):
        if generator.random() < 0.5:
            streambp.enable(model, chunk_size=generator.randint(1, 9))
        else:
            streambp.disable(model)
    streambp.disable(model)
    assert instance_state(model) == before
