"""The method registry: what is applied, and which options are refused."""

import pytest
import torch

from streambp.bench.config import MethodConfig
from streambp.bench.methods import METHODS, Method, apply_method, method_named, method_options


def test_the_three_methods_are_registered():
    assert set(METHODS) >= {"standard", "checkpointing", "streambp"}
    assert all(METHODS[name].name == name and METHODS[name].summary for name in METHODS)


def test_unknown_method_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"method='streambpp'.*checkpointing.*streambp"):
        method_named("streambpp")


def test_option_of_another_method_is_refused_by_name():
    with pytest.raises(ValueError, match=r"method\.chunk_size=64.*'standard'.*no such option"):
        method_options(MethodConfig(name="standard", chunk_size=64))
    with pytest.raises(ValueError, match=r"method\.chunks=3"):
        method_options(MethodConfig(name="streambp", options={"chunks": 3}))


def test_given_options_override_the_defaults():
    options = method_options(MethodConfig(name="streambp", chunk_size=64, keep_kv=True))
    assert options == {
        "chunk_size": 64,
        "head_chunk_size": None,
        "keep_kv": True,
        "keep_attention": False,
        "recompute_head": False,
        "split_sums": False,
        "offload": "none",
    }


def test_checkpointing_is_huggingface_without_reentrance(tiny_model):
    apply_method(tiny_model, MethodConfig(name="checkpointing"))
    layer = tiny_model.model.layers[0]
    assert layer.gradient_checkpointing
    assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_checkpointing_refuses_a_model_that_has_none():
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        apply_method(torch.nn.Linear(2, 2), MethodConfig(name="checkpointing"))


def test_a_later_method_needs_only_its_registration(tiny_model, monkeypatch):
    seen = {}
    method = Method(
        name="tiled",
        summary="a method of the future",
        enable=lambda model, options: seen.update(options, model=model),
        options={"tiles": 4},
    )
    monkeypatch.setitem(METHODS, "tiled", method)
    apply_method(tiny_model, MethodConfig(name="tiled", options={"tiles": 8}))
    assert seen == {"tiles": 8, "model": tiny_model}
