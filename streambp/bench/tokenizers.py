"""Text to token ids: bytes by default, or a Hugging Face tokenizer from a local path."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

__all__ = ["ByteTokenizer", "HfTokenizer", "Tokenizer", "tokenizer_at"]


class Tokenizer(Protocol):
    """``vocab_size`` ids; ``encode`` returns a document's ids (N,) int64, end of text included."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> torch.Tensor: ...


class ByteTokenizer:
    """The UTF-8 bytes of a text, and three special tokens: no file, no training, no unknown text.

    Ids 0 to 255 are the bytes, ``BOS`` = 256, ``EOS`` = 257, ``PAD`` = 258.
    """

    BOS, EOS, PAD = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> torch.Tensor:
        """``BOS``, the bytes, ``EOS``: (N + 2,) int64."""
        content = bytearray(text.encode("utf-8"))
        ids = torch.empty(len(content) + 2, dtype=torch.int64)
        ids[0], ids[-1] = self.BOS, self.EOS
        if content:
            ids[1:-1] = torch.frombuffer(content, dtype=torch.uint8)
        return ids

    def decode(self, ids: torch.Tensor) -> str:
        """The text again; special tokens are dropped, broken characters replaced."""
        return bytes(i for i in ids.tolist() if i < 256).decode("utf-8", errors="replace")


class HfTokenizer:
    """A Hugging Face tokenizer saved in ``path``; its end-of-text token ends every document."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        folder = Path(path).expanduser()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # each tokenizer class fails in its own way
            raise ValueError(
                f"data.tokenizer={path!r} holds no tokenizer that the installed transformers "
                f"reads ({error}): give a folder written by save_pretrained, or null for bytes"
            ) from error
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> torch.Tensor:
        """The text's ids and the end-of-text id if the tokenizer has one: (N,) int64."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return torch.tensor(ids if end is None else [*ids, end], dtype=torch.int64)


def tokenizer_at(path: str | None) -> Tokenizer:
    """The tokenizer saved in ``path``, or the byte tokenizer for ``None``."""
    return ByteTokenizer() if path is None else HfTokenizer(path)
