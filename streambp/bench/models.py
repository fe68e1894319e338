"""Builds the model of a run: random weights decided by a seed, or a checkpoint. No downloads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streambp.bench.config import ModelConfig, TuningConfig

__all__ = ["build", "hf_config", "torch_dtype"]

_ATTENTION_FIELDS = ("attn_implementation", "_attn_implementation")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype called ``name`` (``"float32"``, ``"bfloat16"``, ...)."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} is no floating-point dtype: use float32 or bfloat16")
    return dtype


def hf_config(model_cfg: ModelConfig) -> Any:
    """The Hugging Face config of ``model_cfg``, whichever way it is given.

    ``model.config`` describes the model inline, ``model.hf_config`` is a ``config.json``, and
    ``model.checkpoint`` a folder, or the id of a model in the local Hugging Face cache.

    Errors: ``ValueError`` when the architecture is not in the installed transformers, its config
    class refuses a value, the file or checkpoint can't be read without a download, or it asks for
    another attention than ``sdpa``, which every run uses.
    """
    if model_cfg.checkpoint is not None:
        _check_attention(model_cfg.config, where=f"model.checkpoint={model_cfg.checkpoint!r}")
        return _config_of_checkpoint(model_cfg.checkpoint)
    if model_cfg.hf_config is not None:
        fields = _read_config_json(Path(model_cfg.hf_config).expanduser())
        where = f"model.hf_config={model_cfg.hf_config!r}"
        _check_attention(fields, where=where)
        return _config_from_fields(fields, where=where)
    _check_attention(model_cfg.config, where="model.config")
    return _config_from_fields(model_cfg.config, where="model.config")


def build(
    model_cfg: ModelConfig,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    seed: int,
    tuning: TuningConfig | None = None,
) -> Any:
    """The model of a run in training mode, attention implementation ``sdpa``.

    Random weights are drawn on ``device`` in ``dtype`` from ``seed`` alone, so that all methods
    measured against each other start from the same weights; the global random state is left as it
    was. ``model.checkpoint`` loads its weights instead. On the ``meta`` device nothing is drawn
    and nothing is loaded. With ``tuning.name == "lora"`` linear layers get adapters (of
    ``tuning.adapter_dtype``, or the model's dtype where that is wider) and all else is frozen.

    Errors: ``ValueError`` as ``hf_config``, for a checkpoint without weights, and for
    ``tuning=lora`` without the package ``peft``.
    """
    from transformers import AutoModelForCausalLM

    dtype, device = torch_dtype(dtype), torch.device(device)
    config = hf_config(model_cfg)
    with _seeded(seed, device):
        if model_cfg.checkpoint is not None and device.type != "meta":
            model = _load_checkpoint(model_cfg.checkpoint, config, dtype).to(device)
        else:
            try:
                with device:
                    model = AutoModelForCausalLM.from_config(
                        config, attn_implementation="sdpa", **_dtype_argument(config, dtype)
                    )
            except ValueError as error:
                raise ValueError(f"model={model_cfg.name!r} can't be built: {error}") from error
        if tuning is not None and tuning.name == "lora":
            model = _with_lora(model, tuning)
    model.train()
    return model


def _dtype_argument(config: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype as transformers takes it: ``torch_dtype`` in 4.51, which the paper ran."""
    return {"dtype" if hasattr(config, "dtype") else "torch_dtype": dtype}


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _check_attention(fields: Mapping[str, Any], *, where: str) -> None:
    for name in _ATTENTION_FIELDS:
        if fields.get(name) not in (None, "sdpa"):
            raise ValueError(
                f"{where}: {name}={fields[name]!r}, but every run uses sdpa, so that methods and "
                f"models compare. Fix: remove {name} from the configuration"
            )


def _config_from_fields(fields: dict[str, Any], *, where: str) -> Any:
    from transformers import AutoConfig

    rest = dict(fields)
    model_type = rest.pop("model_type", None)
    if model_type is None:
        raise ValueError(f"{where} names no model_type: add it, e.g. model_type: qwen3")
    try:
        AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(
            f"{where}: model_type={model_type!r} is not known to the installed transformers; "
            "check its spelling or install a newer transformers"
        ) from error
    try:
        return AutoConfig.for_model(model_type, **rest)
    except Exception as error:  # config classes validate with exception types of their own
        raise ValueError(f"{where}: {model_type!r} refuses these values: {error}") from error


def _read_config_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.hf_config={str(file)!r} can't be read as JSON: {error}; give a config.json"
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(f"model.hf_config={str(file)!r} holds no JSON object: give a config.json")
    return fields


def _config_of_checkpoint(checkpoint: str) -> Any:
    from transformers import AutoConfig

    folder = Path(checkpoint).expanduser()
    try:
        return AutoConfig.from_pretrained(
            str(folder) if folder.is_dir() else checkpoint, local_files_only=True
        )
    except (OSError, ValueError) as error:
        if folder.is_dir():
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"model.checkpoint={checkpoint!r} holds no config.json that the installed "
                f"transformers reads ({reason}): give a folder written by save_pretrained"
            ) from error
        raise ValueError(
            f"model.checkpoint={checkpoint!r} is neither a folder nor in the local Hugging Face "
            f"cache, and a run downloads nothing: fetch it first (`hf download {checkpoint}`) or "
            "give the path of a folder"
        ) from error


def _load_checkpoint(checkpoint: str, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    folder = Path(checkpoint).expanduser()
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise ValueError(
            f"model.checkpoint={checkpoint!r} holds no weights ({' or '.join(_WEIGHT_FILES)}): for "
            f"random weights use model.hf_config={str(folder / 'config.json')!r}"
        )
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder) if folder.is_dir() else checkpoint,
            config=config,
            attn_implementation="sdpa",
            local_files_only=True,
            **_dtype_argument(config, dtype),
        )
    except OSError as error:
        raise ValueError(
            f"model.checkpoint={checkpoint!r}: weights can't be read without a download: {error}"
        ) from error


def _with_lora(model: Any, tuning: TuningConfig) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "tuning=lora needs the package 'peft', which is not installed: `pip install peft`, or "
            "use tuning=full"
        ) from error
    dtype = torch.promote_types(torch_dtype(tuning.adapter_dtype), model.dtype)
    lora = peft.LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.alpha,  # type: ignore[arg-type]  # scales by alpha / r
        lora_dropout=tuning.dropout,
        target_modules=tuning.target_modules,
        task_type="CAUSAL_LM",
    )
    adapted: Any = peft.get_peft_model(
        model,
        lora,
        autocast_adapter_dtype=False,
        low_cpu_mem_usage=model.device.type == "meta",
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted
