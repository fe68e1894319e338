"""One layer's keys and values over the whole sequence, behind the cache protocol of transformers.

B batch, T sequence, C chunk, K key/value heads, E head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from streambp.chunks import Chunk
from streambp.labels import label


class KeysCollected(Exception):
    """Leaves a layer's forward once its keys and values of a chunk are stored."""


class KVStream:
    """Stands in for the KV cache while a layer runs chunk by chunk.

    The layer projects a chunk's keys and values and calls `update`, as it does when it prefills a
    prompt in pieces. What happens then depends on `mode`:

    - 'write' stores them and lets the layer go on (forward pass);
    - 'collect' stores them and leaves the layer by `KeysCollected`: neither attention nor MLP run;
    - 'read' leaves what is stored alone (backward pass: the chunk is computed again with grad).

    `update` returns the chunk's own (B, K, C, E) tensors; attention reads the prefix from here and
    adds the prefix's gradients into `grad_keys` and `grad_values`.
    """

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.mode = "write"
        self.chunk = Chunk(0, 0)
        self.updates = 0
        self.keys: torch.Tensor | None = None  # (B, K, T, E)
        self.values: torch.Tensor | None = None  # (B, K, T, E')
        self.grad_keys: torch.Tensor | None = None
        self.grad_values: torch.Tensor | None = None
        self.current: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, chunk: Chunk) -> None:
        """Announce the chunk whose keys and values the next `update` brings."""
        self.chunk = chunk
        self.updates = 0
        self.current = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updates += 1
        if self.updates > 1 or key.shape[2] != self.chunk.size:
            raise ValueError(
                "streambp: this decoder layer writes its KV cache more than once per call, or not "
                "one entry per token; it cannot be streamed exactly."
            )
        self.current = (key, value)
        if self.mode != "read":
            self._store(key, value)
        if self.mode == "collect":
            raise KeysCollected
        return key, value

    def _store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.keys is None or self.values is None:
            self.keys = label(self._empty(key), "kv")
            self.values = label(self._empty(value), "kv")
        start, end = self.chunk.start, self.chunk.end
        self.keys[:, :, start:end] = key.detach()
        self.values[:, :, start:end] = value.detach()

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = like.shape
        device_type = like.device.type
        eligible = like.is_floating_point() and like.dtype != torch.float64
        autocast = torch.is_autocast_enabled(device_type) and eligible
        dtype = torch.get_autocast_dtype(device_type) if autocast else like.dtype
        return like.new_empty(batch, heads, self.length, dim, dtype=dtype)

    def start_gradients(self, num_chunks: int) -> None:
        """Zero the running gradients: fp32 where several chunks add to a 16-bit gradient."""
        assert self.keys is not None and self.values is not None
        dtype = self.keys.dtype
        if num_chunks > 1 and dtype.itemsize < 4:
            dtype = torch.float32
        self.grad_keys = label(torch.zeros_like(self.keys, dtype=dtype), "kv_grads")
        self.grad_values = label(torch.zeros_like(self.values, dtype=dtype), "kv_grads")

    # The rest of the protocol that a layer or its attention may ask for.
    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Tokens before the current chunk."""
        return self.chunk.start
