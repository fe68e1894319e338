"""The ways of running a backward pass that are measured side by side.

A method changes a model in place and declares the options it takes. Adding one to ``METHODS`` is
all that a new method needs: config validation, the worker, the passes and the records read this
registry and nothing else about methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from streambp.bench.config import MethodConfig

if TYPE_CHECKING:
    from torch import nn

__all__ = ["METHODS", "Method", "apply_method", "method_named", "method_options"]


@dataclass(kw_only=True, frozen=True)
class Method:
    """One way of running the backward pass.

    ``name``: its key in ``METHODS`` and in ``conf/method``. ``summary``: one line for tables.
    ``enable(model, options)``: changes ``model`` in place. ``options``: the option names it takes,
    with their defaults.
    """

    name: str
    summary: str
    enable: Callable[[nn.Module, Mapping[str, Any]], None]
    options: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` over the defaults. ``ValueError`` names options this method doesn't take."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = ", ".join(sorted(self.options)) or "no options"
            raise ValueError(
                f"method.{unknown[0]}={options[unknown[0]]!r}: method {self.name!r} has no such "
                f"option; it takes {known}"
            )
        return {**self.options, **options}

    def apply(self, model: nn.Module, options: Mapping[str, Any] | None = None) -> None:
        """Make ``model`` run its backward pass this way, in place. Errors: see ``resolve``."""
        self.enable(model, self.resolve(options or {}))


def _standard(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Plain autograd: nothing to change."""


def _checkpointing(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Hugging Face's own gradient checkpointing, one checkpoint per decoder layer."""
    for entry in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable = getattr(model, entry, None)  # the first name since transformers 5.24
        if enable is not None:
            enable({"use_reentrant": options["use_reentrant"]})
            return
    raise ValueError(
        f"method=checkpointing: {type(model).__name__} has no gradient_checkpointing_enable(); "
        "use a Hugging Face model"
    )


def _streambp(model: nn.Module, options: Mapping[str, Any]) -> None:
    """This project's streamed backward."""
    import streambp

    streambp.enable(model, **options)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="standard",
            summary="plain autograd, every activation kept",
            enable=_standard,
        ),
        Method(
            name="checkpointing",
            summary="Hugging Face gradient checkpointing (use_reentrant=False)",
            enable=_checkpointing,
            options={"use_reentrant": False},
        ),
        Method(
            name="streambp",
            summary="streamed backward over sequence chunks",
            enable=_streambp,
            options={
                "chunk_size": None,
                "head_chunk_size": None,
                "keep_kv": False,
                "keep_attention": False,
                "recompute_head": False,
                "split_sums": False,
                "offload": "none",
            },
        ),
    )
}


def method_named(name: str) -> Method:
    """The method called ``name``; ``ValueError`` that lists the known ones."""
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown: use one of {sorted(METHODS)}")
    return METHODS[name]


def method_options(method_cfg: MethodConfig) -> dict[str, Any]:
    """What the user set under ``method.*``, resolved over the method's defaults.

    ``ValueError`` for an unknown method or an option that it doesn't take.
    """
    given = {
        f.name: getattr(method_cfg, f.name)
        for f in fields(method_cfg)
        if f.name not in ("name", "options") and getattr(method_cfg, f.name) != f.default
    }
    return method_named(method_cfg.name).resolve({**given, **method_cfg.options})


def apply_method(model: nn.Module, method_cfg: MethodConfig) -> None:
    """Make ``model`` run its backward pass as the configuration says, in place."""
    method_named(method_cfg.name).apply(model, method_options(method_cfg))
