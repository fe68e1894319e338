"""A config either is right or says which field is wrong, what it holds and how to mend it."""

import dataclasses
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from streambp.bench.config import ConfigError, RunConfig
from streambp.bench.models import hf_config

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(scope="module")
def composed():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: compose("config", overrides=list(overrides))


@pytest.mark.parametrize("group", ["model", "method", "tuning", "device", "data", "optimizer"])
def test_every_choice_of_every_group_is_valid(composed, group, tmp_path):
    for choice in sorted(path.stem for path in (CONF / group).glob("*.yaml")):
        extra = [f"data.path={tmp_path}"] if choice == "file" else []
        config = RunConfig.from_hydra(composed(f"{group}={choice}", *extra))
        assert getattr(config, group).name == choice


# config.json of the published models: hidden, layers, heads, kv heads, MLP, tied
PUBLISHED = {
    "qwen3_0_6b": (1024, 28, 16, 8, 3072, True),
    "qwen3_1_7b": (2048, 28, 16, 8, 6144, True),
    "qwen3_4b": (2560, 36, 32, 8, 9728, True),
    "qwen3_8b": (4096, 36, 32, 8, 12288, False),
    "qwen3_14b": (5120, 40, 40, 8, 17408, False),
    "qwen3_32b": (5120, 64, 64, 8, 25600, False),
    "llama_3_1_8b": (4096, 32, 32, 8, 14336, False),
    "gemma_3_1b": (1152, 26, 4, 1, 6912, True),
    "qwen2_5_7b": (3584, 28, 28, 4, 18944, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(composed, name):
    fields = RunConfig.from_hydra(composed(f"model={name}")).model.config
    found = tuple(
        fields[key]
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "tie_word_embeddings",
        )
    )
    assert found == PUBLISHED[name]


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        ("seq_len=0", "seq_len=0", "seq_len=1024"),
        ("seq_len=2.5", "seq_len=2.5", "seq_len=1024"),
        ("batch_size=0", "batch_size=0", "batch_size=1"),
        ("steps=-1", "steps=-1", "steps=3"),
        ("dtype=foo", "dtype='foo'", "dtype=bf16"),
        ("dtype=bfloat61", "dtype='bfloat61'", "did you mean dtype=bfloat16"),
        ("budget_gib=0", "budget_gib=0", "budget_gib=80"),
        ("method.chunk_size=0", "method.chunk_size=0", "method.chunk_size=512"),
        ("method.keep_kv=3", "method.keep_kv=3", "true or method.keep_kv=false"),
        ("optimizer.lr=-1", "optimizer.lr=-1", "optimizer.lr=1e-4"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]", "[0.9,0.999]"),
        ("tuning.name=lorra", "tuning.name='lorra'", "did you mean tuning.name=lora"),
        ("device.name=gpu", "device.name='gpu'", "must be one of auto, cuda, cpu, simulated"),
        ("model.hf_config=/no/config.json", "model.hf_config=", "path of an existing file"),
        ("model.checkpoint=/no/where", "model.checkpoint=", "path of an existing folder"),
        ("data.tokenizer=/no/where", "data.tokenizer=", "path of an existing"),
        ("data.name=file", "data.path=None", "data.path="),
        ("+seqlen=3", "seqlen=3", "did you mean seq_len?"),
        ("+method.chunksize=3", "method.chunksize=3", "did you mean method.chunk_size?"),
        ("experiment.name=a/b", "experiment.name='a/b'", "my_name"),
        ("timeout_s=-1", "timeout_s=-1", "timeout_s=600"),
        ("timeout_s=inf", "timeout_s=inf", "timeout_s=null"),
        ("optimizer.betas=3", "optimizer.betas=3", "[0.9,0.999]"),
        ("optimizer.betas=[true,0.9]", "optimizer.betas=[True, 0.9]", "[0.9,0.999]"),
        ("optimizer.lr=inf", "optimizer.lr=inf", "optimizer.lr=1e-4"),
        ("seed=9223372036854775808", "seed=9223372036854775808", "seed=0"),
        ("method.offload=host", "method.offload='host'", "method.offload=none"),
        ("tracking.tags=foo", "tracking.tags='foo'", "tracking.tags=[foo]"),
        ("tracking.tags=[[foo]]", "tracking.tags=[['foo']]", "[one,two]"),
        ("tracking.project=3", "tracking.project=3", "tracking.project=streambp"),
        ("tracking.group=[a]", "tracking.group=['a']", "tracking.group=null"),
        ("+tuning.target_modules=[]", "tuning.target_modules=[]", "[q_proj,v_proj]"),
        ("+tuning.target_modules=3", "tuning.target_modules=3", "[q_proj,v_proj]"),
        ("model.config.hidden_size=0", "model.config.hidden_size=0", "hidden_size=<whole"),
        ("model.config.vocab_size=-1", "model.config.vocab_size=-1", "vocab_size=<whole"),
        ("model.config.head_dim=1.5", "model.config.head_dim=1.5", "head_dim=<whole"),
        ("model.config.num_key_value_heads=3", "num_key_value_heads=3", "=<divisor of "),
        ("model.config=3", "model.config=3", "+model.config.<setting>"),
        ("experiment.options=3", "experiment.options=3", "+experiment.options.<setting>"),
        ("method.options=3", "method.options=3", "+method.options.<setting>"),
        ("device.assumptions=3", "device.assumptions=3", "+device.assumptions.<setting>"),
        (f"data.path={__file__}", "data.path='", "add data=file"),
        ("data.text_field=body", "data.text_field='body'", "add data=file"),
        ("data.path=3", "data.path=3", "add data=file"),
    ],
)
def test_errors_name_field_value_and_fix(composed, override, field, fix):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_hydra(composed(override))
    assert field in str(error.value)
    assert fix in str(error.value)


def test_sizes_of_models_given_by_path_and_of_shared_heads(composed, tmp_path):
    file = tmp_path / "config.json"
    for values, problem in (
        ({"num_hidden_layers": 0}, r"config\.json: num_hidden_layers=0: must be at least 1"),
        ({"hidden_size": 100, "num_attention_heads": 8}, "is no multiple of num_attention_heads=8"),
        ({"text_config": {"hidden_size": 0}}, r"text_config\.hidden_size=0"),
    ):
        file.write_text(json.dumps({"model_type": "llama", **values}))
        with pytest.raises(ConfigError, match=problem):
            RunConfig.from_hydra(composed(f"model.hf_config={file}"))


def test_combinations_that_cannot_work(composed, tmp_path):
    with pytest.raises(ConfigError, match=r"not read by data=random\. Fix: data=corpus"):
        RunConfig.from_hydra(composed("data=random", f"data.tokenizer={tmp_path}"))
    with pytest.raises(ConfigError, match="optimizer=adamw, or device=simulated"):
        RunConfig.from_hydra(composed("optimizer=adamw_8bit", "device=cpu"))
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        RunConfig.from_hydra(composed(f"model.checkpoint={tmp_path}"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    both = [f"model.checkpoint={tmp_path}", f"model.hf_config={tmp_path / 'config.json'}"]
    with pytest.raises(ConfigError, match="give one of the two"):
        RunConfig.from_hydra(composed(*both))


def test_a_model_given_by_path_has_its_name_and_configuration(composed, tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    for override in (f"model.hf_config='{file}'", f"model.checkpoint='{folder}'"):
        model = RunConfig.from_hydra(composed(override)).model
        assert (model.name, model.config["hidden_size"]) == ("my_model", 8)
    for text, problem in (("{", "read as JSON"), ("{}", "names no model_type")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            RunConfig.from_hydra(composed(f"model.hf_config='{file}'"))


def test_a_model_of_the_local_cache_is_given_by_its_id(composed, tmp_path, monkeypatch):
    folder = tmp_path / "models--some--Model-1B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = RunConfig.from_hydra(composed("model.checkpoint=some/Model-1B")).model
    assert (model.name, model.config["hidden_size"]) == ("Model-1B", 8)
    assert hf_config(model).hidden_size == 8
    assert dataclasses.replace(model) == model
    with pytest.raises(ConfigError, match="no model of that id in the local Hugging Face cache"):
        RunConfig.from_hydra(composed("model.checkpoint=some/Model-2B"))


def test_assumptions_are_checked_and_those_left_open_are_dropped(composed):
    assert RunConfig.from_hydra(composed()).device.assumptions == {}
    given = RunConfig.from_hydra(composed("device.assumptions.mask=padding"))
    assert given.device.assumptions == {"mask": "padding"}
    with pytest.raises(ValueError, match=r"device\.assumptions\.mask='square'.*additive"):
        RunConfig.from_hydra(composed("device.assumptions.mask=square"))
    with pytest.raises(ValueError, match=r"device\.assumptions\.foo=1.*one of gradients_resident"):
        RunConfig.from_hydra(composed("+device.assumptions.foo=1"))


def test_a_config_survives_its_file_form(composed):
    config = RunConfig.from_hydra(composed("dtype=bf16", "method.chunk_size=7"))
    assert config.dtype == "bfloat16"
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_configs_are_frozen_and_keyword_only(composed):
    config = RunConfig.from_hydra(composed())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seq_len = 3
    with pytest.raises(TypeError):
        RunConfig(config.model, config.method)
