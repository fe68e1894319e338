"""Models from every kind of description, seeded; and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from streambp.bench.config import ModelConfig, TuningConfig
from streambp.bench.models import build, hf_config, torch_dtype

CONF = Path(__file__).parents[2] / "conf" / "model"


def weights(model):
    return dict(model.state_dict())


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_seed_decides_all_weights_and_leaves_the_global_state(tiny_cfg):
    before = torch.get_rng_state()
    first = build(tiny_cfg, dtype="float32", device="cpu", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    second = build(tiny_cfg, dtype="float32", device="cpu", seed=3)
    other = build(tiny_cfg, dtype="float32", device="cpu", seed=4)
    assert same_weights(first, second)
    assert not same_weights(first, other)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_dtype_mode_and_attention(tiny_cfg, dtype):
    model = build(tiny_cfg, dtype=dtype, device="cpu", seed=0)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral"])
def test_any_architecture_is_given_by_its_fields(tiny_fields, model_type):
    fields = {**tiny_fields, "model_type": model_type}
    model = build(ModelConfig(name="x", config=fields), dtype="float32", device="cpu", seed=0)
    assert model.config.model_type == model_type
    assert model.config.hidden_size == tiny_fields["hidden_size"]


def test_config_json(tmp_path, tiny_fields, tiny_cfg):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_fields))
    from_json = build(
        ModelConfig(name="x", hf_config=str(file)), dtype="float32", device="cpu", seed=1
    )
    assert same_weights(from_json, build(tiny_cfg, dtype="float32", device="cpu", seed=1))


def test_checkpoint_loads_its_weights_whatever_the_seed(tmp_path, tiny_cfg):
    saved = build(tiny_cfg, dtype="float32", device="cpu", seed=1)
    saved.save_pretrained(tmp_path)
    cfg = ModelConfig(name="x", checkpoint=str(tmp_path))
    assert same_weights(saved, build(cfg, dtype="float32", device="cpu", seed=2))
    assert next(build(cfg, dtype="float32", device="meta", seed=2).parameters()).is_meta


def test_checkpoint_without_weights_says_how_to_get_random_ones(tmp_path, tiny_cfg):
    hf_config(tiny_cfg).save_pretrained(tmp_path)
    cfg = ModelConfig(name="x", checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match=r"holds no weights.*model\.hf_config="):
        build(cfg, dtype="float32", device="cpu", seed=0)


def test_unknown_architecture_names_the_field():
    with pytest.raises(ValueError, match="model_type='qwenn3' is not known"):
        hf_config(ModelConfig(name="x", config={"model_type": "qwenn3"}))


def test_refused_value_carries_the_reason(tiny_fields):
    fields = {**tiny_fields, "rms_norm_eps": "small"}
    with pytest.raises(ValueError, match=r"model\.config: 'qwen3' refuses.*rms_norm_eps"):
        hf_config(ModelConfig(name="x", config=fields))


def test_config_json_that_is_not_one(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="can't be read as JSON"):
        hf_config(ModelConfig(name="x", hf_config=str(file)))
    file.write_text('{"hidden_size": 3}')
    with pytest.raises(ValueError, match="names no model_type"):
        hf_config(ModelConfig(name="x", hf_config=str(file)))


def test_lora_trains_adapters_only(tiny_cfg):
    tuning = TuningConfig(name="lora", rank=2, alpha=4.0)
    model = build(tiny_cfg, dtype="bfloat16", device="cpu", seed=0, tuning=tuning)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    again = build(tiny_cfg, dtype="bfloat16", device="cpu", seed=0, tuning=tuning)
    assert same_weights(model, again)
    on_meta = build(tiny_cfg, dtype="bfloat16", device="meta", seed=0, tuning=tuning)
    assert all(p.is_meta for p in on_meta.parameters())


def test_lora_keeps_a_wider_model_dtype_and_takes_a_narrow_adapter(tiny_cfg):
    def adapter_dtypes(model_dtype, adapter_dtype):
        tuning = TuningConfig(name="lora", rank=2, adapter_dtype=adapter_dtype)
        model = build(tiny_cfg, dtype=model_dtype, device="cpu", seed=0, tuning=tuning)
        return {p.dtype for p in model.parameters() if p.requires_grad}

    assert adapter_dtypes("float64", "float32") == {torch.float64}
    assert adapter_dtypes("bfloat16", "bfloat16") == {torch.bfloat16}


def test_lora_without_peft_names_the_package(tiny_cfg, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        build(tiny_cfg, dtype="float32", device="cpu", seed=0, tuning=TuningConfig(name="lora"))


def test_dtype_that_is_none():
    for name in ("float33", "int64", "nn"):
        with pytest.raises(ValueError, match=f"dtype='{name}'"):
            torch_dtype(name)


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_model_of_conf_is_understood(file):
    config = hf_config(ModelConfig(**yaml.safe_load(file.read_text())))
    assert config.get_text_config().num_hidden_layers >= 1


def test_the_published_8b_model_has_its_published_size():
    cfg = ModelConfig(**yaml.safe_load((CONF / "qwen3_8b.yaml").read_text()))
    model = build(cfg, dtype="bfloat16", device="meta", seed=0)
    assert sum(p.numel() for p in model.parameters()) == 8_190_735_360
