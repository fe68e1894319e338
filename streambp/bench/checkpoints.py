"""Where a checkpoint's configuration lies on this machine; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from streambp.bench.errors import ConfigError


def config_of_checkpoint(checkpoint: str) -> Path:
    """The config.json of a checkpoint folder, or of a model in the local Hugging Face cache."""
    folder = Path(checkpoint).expanduser().absolute()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            problem = "the folder holds no config.json"
            raise ConfigError(
                "model.checkpoint", checkpoint, problem, "a folder written by save_pretrained"
            )
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(checkpoint, "config.json")
    except ValueError:  # not an id at all
        cached = None
    if not isinstance(cached, str):
        raise ConfigError(
            "model.checkpoint",
            checkpoint,
            f"no such folder (looked at {folder}) and no model of that id in the local Hugging "
            "Face cache; nothing is downloaded",
            "model.checkpoint=<path of an existing folder>",
        )
    return Path(cached)
