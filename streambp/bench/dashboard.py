"""The W&B dashboard as code: `python -m streambp.bench.dashboard`.

With `wandb-workspaces` installed and a W&B key it creates the workspace (or a new view of it) in
the project. Else it writes the definition to a file and says how to apply it from a machine that
can. The definition is plain data, the same in both cases.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streambp.bench.config import TrackingConfig
from streambp.bench.tracking.wandb_tracker import mode

NAME = "streambp"
EXIT_NOT_APPLIED = 2
# Panels by the class of wandb_workspaces.reports.v2 that draws them, with its arguments. x and
# metrics named "config." or "summary." are of the run, others are logged per step.
_SECTIONS: tuple[tuple[str, tuple[tuple[str, dict[str, Any]], ...]], ...] = (
    (
        "Training",
        (
            ("LinePlot", {"title": "Loss", "x": "Step", "y": ["training/loss"]}),
            ("LinePlot", {"title": "Gradient norm", "x": "Step", "y": ["training/grad_norm"]}),
        ),
    ),
    (
        "Memory",
        (
            (
                "ScatterPlot",
                {
                    "title": "Peak allocated bytes over sequence length (GPU or simulated)",
                    "x": "config.seq_len",
                    "y": "summary.memory/peak_allocated_bytes",
                    "legend_template": "${config:method.name} ${config:model.name}",
                },
            ),
            (
                "ScatterPlot",
                {
                    "title": "Peak bytes of live tensors over sequence length (CPU)",
                    "x": "config.seq_len",
                    "y": "summary.memory/peak_live_bytes",
                    "legend_template": "${config:method.name} ${config:model.name}",
                },
            ),
            (
                "BarPlot",
                {
                    "title": "Activation peak bytes by method",
                    "metrics": ["memory/activation_peak_bytes"],
                    "groupby": "config.method.name",
                    "groupby_aggfunc": "max",
                },
            ),
            (
                "CustomChart",
                {
                    "query": {"summaryTable": {"tableKey": "memory/timeline"}},
                    "chart_name": "wandb/line/v0",
                    "chart_fields": {"x": "op_index", "y": "live_bytes", "stroke": "category"},
                    "chart_strings": {"title": "Live bytes by category over one pass"},
                },
            ),
            ("WeavePanelSummaryTable", {"table_name": "memory/timeline"}),
        ),
    ),
    (
        "Time",
        (
            (
                "ScatterPlot",
                {
                    "title": "Seconds of a forward and backward pass over sequence length",
                    "x": "config.seq_len",
                    "y": "summary.time/forward_backward_time_s_median",
                    "legend_template": "${config:method.name} ${config:device.name}",
                },
            ),
            ("WeavePanelSummaryTable", {"table_name": "time/samples"}),
        ),
    ),
    (
        "Comparison with the paper",
        (
            ("WeavePanelSummaryTable", {"table_name": "paper/comparison"}),
            ("WeavePanelSummaryTable", {"table_name": "search/probes"}),
        ),
    ),
    ("Runs", (("RunComparer", {"diff_only": "split"}),)),
)


def definition(project: str, entity: str | None = None) -> dict[str, Any]:
    """The dashboard as JSON-ready data."""
    sections = [
        {"name": name, "panels": [{"kind": kind, **values} for kind, values in panels]}
        for name, panels in _SECTIONS
    ]
    return {"name": NAME, "project": project, "entity": entity, "sections": sections}


def workspace(values: Mapping[str, Any]) -> Any:
    """The definition as a `wandb_workspaces` Workspace that is not saved yet.

    Raises:
        ImportError: wandb-workspaces is not installed.
    """
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    return workspaces.Workspace(
        entity=values["entity"] or "",
        project=values["project"],
        name=values["name"],
        sections=[
            workspaces.Section(
                name=section["name"],
                panels=[_panel(panels, panel) for panel in section["panels"]],
                is_open=True,
            )
            for section in values["sections"]
        ],
    )


def _panel(panels: Any, values: Mapping[str, Any]) -> Any:
    arguments = {key: value for key, value in values.items() if key != "kind"}
    for key in ("x", "y", "groupby"):
        name = arguments.get(key)
        if isinstance(name, str) and name.startswith("config."):
            arguments[key] = panels.Config(name.removeprefix("config."))
        elif isinstance(name, str) and name.startswith("summary."):
            arguments[key] = panels.SummaryMetric(name.removeprefix("summary."))
    return getattr(panels, values["kind"])(**arguments)


def obstacle() -> str | None:
    """Why the dashboard cannot be created from here, or None."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        return "wandb-workspaces is not installed (the extra `dashboard` of this project)"
    if mode(TrackingConfig(name="wandb")) != "online":
        return "W&B has no key for this user, or is set to offline"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m streambp.bench.dashboard",
        description="Create the project's W&B dashboard, or write its definition to a file.",
    )
    parser.add_argument("--project", default=TrackingConfig().project)
    parser.add_argument("--entity", default=None, help="user or team; default: W&B's own")
    parser.add_argument("--out", type=Path, default=Path("dashboard.json"))
    parser.add_argument("--definition", type=Path, help="apply this file instead of the built-in")
    options = parser.parse_args(arguments)
    try:
        values = definition(options.project, options.entity)
        if options.definition:
            values = json.loads(options.definition.read_text(encoding="utf-8"))
        reason = obstacle()
        if reason is None:
            try:
                return _apply(values)
            except Exception as error:  # no network, no permission: W&B's own words say which
                reason = f"W&B refused or could not be reached ({type(error).__name__}: {error})"
        options.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_APPLIED
    print(
        f"not created: {reason}.\nThe definition is in {options.out}. To apply it, on a machine "
        "that reaches your W&B server:\n  pip install wandb-workspaces && wandb login\n"
        f"  python -m streambp.bench.dashboard --definition {options.out}"
    )
    return 0


def _apply(values: dict[str, Any]) -> int:
    if values["entity"] is None:
        import wandb

        values = {**values, "entity": wandb.Api().default_entity}
    saved = workspace(values)
    saved.save()
    print(f"created: {saved.url}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
