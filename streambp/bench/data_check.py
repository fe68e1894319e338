"""What is wrong with a run's data and can be seen at once: before a model is built, without torch.

The worker checks all of it while it reads; this looks at sizes and at the start of each file.
"""

from __future__ import annotations

import json
from pathlib import Path

from streambp.bench.config import ConfigError, RunConfig
from streambp.bench.documents import (
    TextFiles,
    is_jsonl,
    is_saved_dataset,
    text_files,
    text_of_line,
)

_NUM_BYTE_IDS = 259  # of the byte tokenizer: bytes, and begin, end and padding
_CHECKED_BYTES = 1 << 20  # of each file
_CHECKED_FILES = 16


def check_data(config: RunConfig) -> None:
    """Raise ValueError, naming the setting and the fix, for data that the worker cannot use.

    Looked at: the vocabulary of the byte tokenizer, an empty or too short source, files that are
    no UTF-8 text, lines that are no JSON or lack the key, columns that a saved dataset lacks.
    """
    data = config.data
    if data.name == "random":
        return
    vocab_size = config.model.config.get("vocab_size")
    if data.tokenizer is None and isinstance(vocab_size, int) and vocab_size < _NUM_BYTE_IDS:
        raise ConfigError(
            "data.tokenizer",
            None,
            f"the {_NUM_BYTE_IDS} ids of the bytes exceed the model's vocabulary of {vocab_size}",
            f"a model whose vocab_size is at least {_NUM_BYTE_IDS}, or data=random",
        )
    if data.name != "file":
        return
    assert data.path is not None
    path = Path(data.path).expanduser()
    if path.is_dir() and is_saved_dataset(path):
        _check_columns(path, data.text_field)
        return
    files = text_files(path) if path.is_dir() else [path]
    try:
        most = sum(_most_tokens(file) for file in files)
        for file in files[:_CHECKED_FILES]:
            _check_start(file, data.text_field)
    except OSError as error:
        problem = f"can't be read ({error.strerror or error})"
        raise ConfigError("data.path", data.path, problem, "allow reading it") from None
    needed = 1 if config.searches else config.batch_size * config.seq_len
    if most == 0 or (data.tokenizer is None and most < needed):
        raise ConfigError(
            "data.path",
            data.path,
            f"at most {most} tokens of text don't fill one batch of batch_size={config.batch_size} "
            f"x seq_len={config.seq_len} tokens",
            "more text, or a lower seq_len or batch_size",
        )


def _most_tokens(file: Path) -> int:
    """As many tokens as a file can have as bytes: two more for each document that is no JSON."""
    size = file.stat().st_size
    return size if is_jsonl(file) else size + 2 * len(TextFiles([file], errors="strict"))


def _check_start(file: Path, field: str) -> None:
    if is_jsonl(file):
        with file.open("rb") as lines:
            read = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    text_of_line(file, field, line, number)
                read += len(line)
                if read > _CHECKED_BYTES:
                    break
        return
    pieces = TextFiles([file], errors="strict")
    if len(pieces):
        pieces[0]


def _check_columns(folder: Path, field: str) -> None:
    """Raise for a column that the dataset's own description lacks; silent where it has none."""
    for place in (folder, folder / "train"):
        try:
            values = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
            columns = list(values["features"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if columns and field not in columns:
            raise ConfigError(
                "data.text_field",
                field,
                f"the dataset in {folder} has the columns {', '.join(columns)}",
                f"data.text_field={columns[0]}",
            )
        return
