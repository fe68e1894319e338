"""Names the part of a step that runs, so that peaks can be told apart and extrapolated in depth.

A phase of a decoder layer is named by the layer's place: counted from the front, from the back, or
by its position in the repeating pattern in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from streambp.sim.tracker import LiveTracker


def layer_place(index: int, num_layers: int, period: int) -> str:
    """Place of layer `index`: "first+i", "last-i", or "middle" (of a pattern: "middle%i").

    With period 1 the first and the last layer have their own names; with period p, p of each.
    """
    if index < period:
        return "first" if period == 1 else f"first+{index}"
    if index >= num_layers - period:
        return "last" if period == 1 else f"last-{num_layers - 1 - index}"
    return "middle" if period == 1 else f"middle%{index % period}"


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers of a Hugging Face causal LM, wrapped by PEFT or not.

    Raises:
        ValueError: no module list called `layers`.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "layers" and isinstance(module, nn.ModuleList):
            return module
    raise ValueError(f"{type(model).__name__} has no module list called 'layers'")


class PhaseMarker:
    """Sets `tracker.phase` as a step moves through embedding, layers and head, there and back.

    Also labels the hidden states that enter each layer as "saved_inputs".
    """

    def __init__(self, tracker: LiveTracker, model: nn.Module, period: int):
        self._tracker = tracker
        self._model = model
        self._layers = decoder_layers(model)
        self._period = period
        self._backward = False

    @contextlib.contextmanager
    def attached(self) -> Iterator[PhaseMarker]:
        """Hooks on the layers and the input embedding, removed at the end."""
        with contextlib.ExitStack() as stack:
            embedding = self._model.get_input_embeddings()  # type: ignore[operator]
            handle = embedding.register_forward_hook(self._after("backward/embedding"))
            stack.callback(handle.remove)
            for index, layer in enumerate(self._layers):
                place = layer_place(index, len(self._layers), self._period)
                before = layer.register_forward_pre_hook(
                    self._before(f"forward/layer {place}", f"layer {index} input"),
                    with_kwargs=True,
                )
                is_last = index == len(self._layers) - 1
                after = layer.register_forward_hook(
                    self._after(f"backward/layer {place}", "forward/head" if is_last else None)
                )
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield self

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Encloses "forward" or "backward" of a step."""
        self._backward = name == "backward"
        self._tracker.phase = "backward/head" if self._backward else "forward/embedding"
        yield
        self._tracker.phase = "after " + name

    def _before(self, phase: str, input_name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._backward:
                return  # recomputation: the backward phase goes on
            self._tracker.phase = phase
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor):
                self._tracker.register(hidden, "saved_inputs", input_name)

        return enter

    def _after(self, backward_phase: str, next_phase: str | None = None) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._backward:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: self._enter_backward(backward_phase))
            if next_phase is not None:
                self._tracker.phase = next_phase

        return leave

    def _enter_backward(self, phase: str) -> None:
        self._tracker.phase = phase
