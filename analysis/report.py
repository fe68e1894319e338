"""`python -m analysis.report`: one self-contained HTML page of everything that was run.

Headline ratios, each experiment's tables and plots, memory timelines, failed runs, what was
measured and what simulated, and the command that reproduces each part. Pictures are inline; the
page needs no network.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from analysis import command
from analysis.captions import caption
from analysis.compare import method_order
from analysis.headlines import Headline, headlines
from analysis.load import frame
from analysis.markup import figure_html, png, svg, table_html
from analysis.plots import plots
from analysis.shown import Shown
from analysis.tables import TITLES, tables
from analysis.timeline import timelines_figure
from streambp.bench import paper
from streambp.bench.folders import LOG_NAME, TIMELINE_NAME
from streambp.bench.records import RunRecord, utc_now

_MAX_TIMELINES = 6  # groups of runs whose timelines are drawn
_PROVENANCES = {
    "measured": "a clock or an allocator read it while the real program ran",
    "simulated": "the real program ran on tensors without storage, counted as the GPU would",
    "predicted": "a formula: the time of a roofline with stated efficiencies",
}


def report(found: Sequence[RunRecord], skipped: Sequence[str] = (), note: str | None = None) -> str:
    """The page as one string. `skipped`: warnings about files that were no records; `note`: what
    to say about the records first."""
    said = f"<p class=note>{html.escape(note)}</p>" if note else ""
    sections = [("summary", "Summary", said + _summary(found, skipped))]
    for experiment in paper.EXPERIMENTS:
        body = _experiment(found, experiment)
        if body:
            sections.append((experiment, TITLES[experiment], body))
    for name, title, body in (
        ("timelines", "Memory over one pass", _timelines(found)),
        ("other", "Other experiments", _other(found)),
        ("failures", "Runs without a result", _failures(found)),
    ):
        if body:
            sections.append((name, title, body))
    links = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in sections)
    content = "".join(
        f'<section id="{name}"><h2>{html.escape(title)}</h2>{body}</section>'
        for name, title, body in sections
    )
    template = (resources.files("analysis") / "report.html").read_text(encoding="utf-8")
    return template.replace("@NAV@", links).replace("@CONTENT@", content)


def _summary(found: Sequence[RunRecord], skipped: Sequence[str]) -> str:
    rows = frame(found)
    statuses = rows["status"].value_counts()
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    parts = [f"<p>{len(found)} runs ({counts or 'none'}). Written {_now()}.</p>"]
    lines = headlines(found)
    parts.append(_headline_cards(lines))
    used: dict[str, int] = {}
    for column in ("provenance_memory", "provenance_time", "provenance_search"):
        for kind, count in rows[column].value_counts().items():
            used[str(kind)] = used.get(str(kind), 0) + int(count)
    items = "".join(
        f"<li><strong>{kind}</strong>: {_PROVENANCES[kind]} ({used[kind]} numbers here).</li>"
        for kind in _PROVENANCES
        if kind in used
    )
    parts.append(f"<h3>How the numbers came to be</h3><ul>{items}</ul>")
    parts.append(
        "<p>Published numbers are those of arXiv 2506.03077, measured on one "
        f"{paper.PAPER_GPU} with the authors' code.</p>"
    )
    if skipped:
        entries = "".join(f"<li>{html.escape(text)}</li>" for text in skipped)
        parts.append(f"<h3>Files that were not read</h3><ul class=small>{entries}</ul>")
    return "".join(parts)


def _now() -> str:
    return utc_now().replace("T", " ").removesuffix("+00:00") + " UTC"


def _headline_cards(lines: Sequence[Headline]) -> str:
    """A card per published ratio; what has no published counterpart in a table below."""
    if not lines:
        return "<p>No two methods were run at the same setting yet: no ratios.</p>"
    cards = []
    for line in lines:
        published = "" if line.published is None else f"published {line.published:.2f}×"
        cards.append(
            f"<div class=card><div class=what>{html.escape(line.what)}</div>"
            f"<div class=ratio>{line.ours:.2f}×</div>"
            f"<div class=published>{published}</div>"
            f"<div class=setting>{html.escape(line.setting)}<br>"
            f"{html.escape(line.device_label)}<br><em>{html.escape(line.provenance)}</em></div>"
            "</div>"
        )
    return f"<div class=cards>{''.join(cards)}</div>"


def _experiment(found: Sequence[RunRecord], experiment: str) -> str:
    built = tables(found, experiment)
    if not built:
        return ""
    own = [record for record in found if record.experiment == experiment]
    pictures = plots(found, experiment)
    parts = [figure_html(svg(p.figure, p.title), p.title, p.caption) for p in pictures]
    parts += [table_html(table) for table in built]
    return "".join(parts) + _reproduce(experiment, own)


def _reproduce(experiment: str, own: Sequence[RunRecord]) -> str:
    """The commands behind a section: one per device that its records name."""
    devices = sorted({str((r.config.get("device") or {}).get("name")) for r in own})
    commands = []
    for device in devices:
        small = {str(r.config["model"]["name"]) for r in own} if device == "cpu" else set()
        comment = f"  # {', '.join(sorted(small))}" if small and len(devices) == 1 else ""
        commands.append(f"python run.py -m experiment={experiment} device={device}{comment}")
    text = html.escape("\n".join(commands))
    return f"<details><summary>How to reproduce</summary><pre>{text}</pre></details>"


def _timelines(found: Sequence[RunRecord]) -> str:
    """Timelines of runs that differ in the method alone, below each other."""
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for record in found:
        if record.path is None or not (record.path.parent / TIMELINE_NAME).exists():
            continue
        config = record.config
        options = config["experiment"].get("options") or {}
        key = [config["model"]["name"], config["seq_len"], config["batch_size"]]
        key += [config["device"]["name"], config["tuning"]["name"], options.get("rows")]
        groups.setdefault(tuple(map(str, key)), []).append(record)
    parts = []
    for runs in list(groups.values())[-_MAX_TIMELINES:]:
        newest = {repr(run.config["method"]): run for run in runs}
        chosen = sorted(newest.values(), key=_method)[:4]
        try:
            figure = timelines_figure(chosen)
        except ValueError as error:
            parts.append(f"<p class=small>{html.escape(str(error))}</p>")
            continue
        title = "Live memory by category over one forward and backward pass"
        parts.append(figure_html(png(figure, title), title, caption(frame(chosen))))
    if not parts:
        return ""
    command = (
        "python run.py -m method=standard,checkpointing,streambp measure.timeline=true\n"
        "python -m analysis.timeline runs/<experiment>/<job>"
    )
    return "".join(parts) + (
        f"<details><summary>How to reproduce</summary><pre>{html.escape(command)}</pre></details>"
    )


def _method(record: RunRecord) -> tuple[int, str]:
    return method_order(record.config["method"]["name"])


def _other(found: Sequence[RunRecord]) -> str:
    """What a benchmark says in words, and the runs of experiments that the paper does not have."""
    parts = []
    others = [r for r in found if r.experiment not in paper.EXPERIMENTS and r.status == "ok"]
    for record in others:
        summary = getattr(record, "benchmark", None) or {}
        if summary.get("summary"):
            text = html.escape("\n".join(map(str, summary["summary"])))
            parts.append(
                f"<h3>{html.escape(record.experiment)}</h3><pre class=small>{text}</pre>"
                f"{_reproduce(record.experiment, [record])}"
            )
    plain = [r for r in others if not getattr(r, "benchmark", None)]
    if plain:
        parts.append(_plain_runs(plain))
    return "".join(parts)


def _plain_runs(found: Sequence[RunRecord]) -> str:
    rows = frame(found)
    heads = ("experiment", "model", "method", "T", "device", "peak, GiB", "forward + backward, s")
    lines = []
    for row in rows.to_dict("records"):
        peak, seconds = row["peak_bytes"], row["forward_backward_time_s"]
        kind = row["provenance_memory"] or ""
        time_kind = row["provenance_time"] or ""
        cells = [
            row["experiment"],
            row["model"],
            row["variant"],
            f"{row['seq_len_tokens']:,}",
            row["device_label"],
            f"{peak / 2**30:.3f} ({kind})" if peak == peak and peak is not None else "–",
            f"{seconds:.3f} ({time_kind})" if seconds == seconds and seconds is not None else "–",
        ]
        lines.append("".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<h3>Single runs</h3><div class=scroll tabindex=0><table class=plain>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _failures(found: Sequence[RunRecord]) -> str:
    """Every run that ended without an answer, with its reason and its log."""
    items = []
    for record in found:
        if record.status not in ("error", "killed"):
            continue
        log = record.path.parent / LOG_NAME if record.path is not None else None
        words = " ".join(record.overrides) or record.job
        items.append(
            f"<li><strong>{record.status}</strong> {html.escape(words)}<br>"
            f"{html.escape(str(record.status_detail))}"
            f"{'<br>log: ' + html.escape(str(log)) if log else ''}</li>"
        )
    return f"<ul class=small>{''.join(items)}</ul>" if items else ""


def main(arguments: Sequence[str] | None = None) -> int:
    def work(found: Shown, out: Path, skipped: Sequence[str]) -> str:
        page = report(found.records, skipped, found.note)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
        return f"{out}: {len(found.records)} runs, {len(page) / 2**20:.1f} MiB"

    return command.main(
        arguments,
        prog="python -m analysis.report",
        description=__doc__,
        out=Path("report.html"),
        work=work,
    )


if __name__ == "__main__":
    sys.exit(main())
