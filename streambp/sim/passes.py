"""One forward and backward pass on tensors without storage, measured.

Shapes: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from streambp import kernels
from streambp.bench.memory.state import fill_gradients
from streambp.bench.methods import method_named
from streambp.bench.models import build, hf_config, torch_dtype
from streambp.bench.step import forward_backward
from streambp.sim.chunkloops import shortened
from streambp.sim.costs import CostCounter
from streambp.sim.errors import SimulationError
from streambp.sim.fake import explained, fake_mode, to_fake, without_data
from streambp.sim.optimizer import allocate_states
from streambp.sim.phases import PhaseMarker
from streambp.sim.routing import UNROUTED, cuda_attention
from streambp.sim.tracker import WORKSPACES, Block, Event, LiveTracker, Workspace, register_model
from streambp.sim.workload import Workload
from streambp.sim.workspaces import ATTENTION_WORKSPACES, cublas_workspace_bytes

#: Attention implementations whose CUDA behaviour is modelled.
_KNOWN_ATTENTION = ("sdpa", "eager", "streambp")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A measured pass.

    `tracker` holds the peaks by phase, `resident_by_category` what was alive before it. `blocks`:
    what came and went, by phase, if recorded.
    """

    tracker: LiveTracker
    resident_by_category: dict[str, int]
    costs: CostCounter | None
    blocks: list[Block] | None


def run_pass(
    workload: Workload,
    *,
    period: int = 1,
    costs: CostCounter | None = None,
    record_events: bool = False,
    all_chunks: bool = False,
) -> Pass:
    """Build the model, apply the method and run one step, all without storage.

    period: layers after which the model's pattern repeats (names the phases). all_chunks: run
    loops over chunks whole instead of the few chunks that decide the peak.

    Raises:
        SimulationError: an op that needs data, or attention the routing doesn't know.
        ValueError: what a real run of the same configuration would refuse.
    """
    with _prepared(
        workload, costs=costs, all_chunks=all_chunks, record_events=record_events
    ) as ready:
        resident = ready.tracker.live_by_category()
        marker = PhaseMarker(ready.tracker, ready.model, period)
        with marker.attached(), costs or contextlib.nullcontext():
            step = forward_backward(
                ready.model,
                ready.batch,
                workload.objective,
                keep_outputs=workload.assumptions.outputs_kept,
                around=_around(marker, costs),
            )
        blocks = ready.tracker.blocks
        ready.tracker.phase = "end"
        del step
    return Pass(
        tracker=ready.tracker,
        resident_by_category=resident,
        costs=costs,
        blocks=None if blocks is None else [block for block in blocks if block.phase != "end"],
    )


def resident_events(workload: Workload) -> list[Event]:
    """What `run_pass` allocates before its pass, the pass not run."""
    with _prepared(workload, record_events=True) as ready:
        return ready.tracker.events


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """All that a pass needs, in memory."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    kept: list[torch.Tensor]
    tracker: LiveTracker


@contextlib.contextmanager
def _prepared(
    workload: Workload,
    *,
    record_events: bool,
    costs: CostCounter | None = None,
    all_chunks: bool = False,
) -> Iterator[_Ready]:
    """The model with the method applied, its gradients, optimizer states and batch, tracked."""
    model = build(
        workload.model, dtype=workload.dtype, device="meta", seed=0, tuning=workload.tuning
    )
    on_cuda = workload.gpu is not None
    tracker = LiveTracker(
        round_to=512 if on_cuda else 1,
        workspaces=_workspaces(workload),
        classify=_logits_of(model),
        record_events=record_events,
    )
    mode = fake_mode()
    to_fake(model, mode)
    what = f"method={workload.method} of {workload.model.name}"
    with explained(what), mode, _environment(workload), contextlib.ExitStack() as loops:
        method_named(workload.method).apply(model, workload.method_options)
        if not all_chunks:
            loops.enter_context(_fewer_chunks(workload, costs))
        _check_attention(model)
        if workload.assumptions.gradients_resident:
            fill_gradients(model)
        with tracker, register_model(tracker, model):
            kept = _resident_tensors(workload, model, tracker)
            batch = _batch(workload, model, tracker)
            yield _Ready(model=model, batch=batch, kept=kept, tracker=tracker)


@contextlib.contextmanager
def _environment(workload: Workload) -> Iterator[None]:
    """Everything that makes the program take the path it would take on the GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_data(padding=workload.assumptions.mask == "padding"))
        if workload.gpu is not None:
            stack.enter_context(cuda_attention(workload.gpu))
            stack.enter_context(kernels.use_device("cuda"))
        yield


def _fewer_chunks(
    workload: Workload, costs: CostCounter | None
) -> contextlib.AbstractContextManager[None]:
    """Loops over chunks without those in the middle, each chunk's costs weighted."""

    def weigh(weight: Fraction) -> None:
        if costs is not None:
            costs.weight = weight

    return shortened(_window(workload), weigh)


def _window(workload: Workload) -> int | None:
    """Tokens a layer with a sliding window sees; None without such layers."""
    config = hf_config(workload.model)
    return getattr(config, "sliding_window", None)


def _workspaces(workload: Workload) -> dict[Any, Workspace]:
    if workload.gpu is None:
        return {}
    return {
        **UNROUTED,
        **(ATTENTION_WORKSPACES if workload.assumptions.attention_workspace else {}),
    }


def _resident_tensors(
    workload: Workload, model: nn.Module, tracker: LiveTracker
) -> list[torch.Tensor]:
    """Allocate what else exists before the pass: optimizer states and cuBLAS workspaces."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state_dtype = workload.optimizer_state_dtype
    states = allocate_states(
        trainable.values(), workload.optimizer, torch_dtype(state_dtype) if state_dtype else None
    )
    kept = []
    for name, states_of_one in zip(trainable, states, strict=False):  # none without an optimizer
        for state in states_of_one:
            tracker.register(state, "optimizer", name)
            kept.append(state)
    if workload.gpu is not None and workload.assumptions.cublas_workspace:
        for num_bytes in cublas_workspace_bytes(workload.gpu.sm):
            workspace = torch.empty(num_bytes, dtype=torch.uint8)
            tracker.register(workspace, WORKSPACES, "cuBLAS workspace")
            kept.append(workspace)
    return kept


def _batch(workload: Workload, model: nn.Module, tracker: LiveTracker) -> dict[str, torch.Tensor]:
    """Token ids and labels (B, T), and a mask where padding is assumed."""
    shape = (workload.batch_size, workload.seq_len)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    if workload.assumptions.mask == "padding":
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    elif workload.assumptions.mask == "additive":
        square = (workload.batch_size, 1, workload.seq_len, workload.seq_len)
        batch["attention_mask"] = torch.zeros(square, dtype=torch_dtype(workload.dtype))
    for name, tensor in batch.items():
        tracker.register(tensor, "inputs", name)
    return batch


def _logits_of(model: nn.Module) -> Callable[[torch.Tensor], str | None]:
    """Anything with a last dimension of V is logits, their log-probabilities or gradients."""
    vocab_size = model.config.vocab_size  # type: ignore[union-attr]

    def classify(tensor: torch.Tensor) -> str | None:
        return "logits" if tensor.dim() > 1 and tensor.shape[-1] == vocab_size else None

    return classify


def _check_attention(model: nn.Module) -> None:
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in _KNOWN_ATTENTION:
        raise SimulationError(
            f"attn_implementation={implementation!r}: its CUDA kernels are not modelled. "
            f"Fix: one of {', '.join(_KNOWN_ATTENTION)}"
        )


def _around(marker: PhaseMarker, costs: CostCounter | None) -> Callable[[str], Any]:
    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        with marker.around(name), costs.around(name) if costs else contextlib.nullcontext():
            yield

    return around
