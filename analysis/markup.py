"""Tables and pictures as HTML that needs nothing else: inline SVG and PNG."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from analysis import style
from analysis.tables import Table


def table_html(table: Table) -> str:
    """A table as HTML; wide ones scroll in their own box."""
    group_cells, place = [], 0
    for heading, span in table.groups:
        kind = "" if place < table.num_keys else " class=group"
        group_cells.append(f"<th colspan={span}{kind}>{html.escape(heading)}</th>")
        place += span
    starts = set()
    place = 0
    for _, span in table.groups:
        starts.add(place)
        place += span
    head = "".join(
        f"<th{_class(i, table, starts)}>{html.escape(name)}</th>"
        for i, name in enumerate(table.columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(i, table, starts, cell)}>{html.escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in table.rows
    )
    groups = f"<tr>{''.join(group_cells)}</tr>" if any(h for h, _ in table.groups) else ""
    return (
        f"<h3>{html.escape(table.title)}</h3><div class=scroll tabindex=0><table>"
        f"<thead>{groups}<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"<p class=small>{html.escape(table.caption)}</p>"
    )


def _class(index: int, table: Table, starts: set[int], cell: str = "") -> str:
    names = ["key"] if index < table.num_keys else []
    if index in starts and index:
        names.append("start")
    if not cell and len(table.columns[index]) > 24:
        names.append("long")
    if cell.startswith("OOM"):
        names.append("oom")
    return f' class="{" ".join(names)}"' if names else ""


def figure_html(picture: str, title: str, text: str) -> str:
    """A picture under its title; wide ones scroll in their own box. The caption is page text."""
    return (
        f"<figure><h3>{html.escape(title)}</h3><div class=scroll tabindex=0>{picture}</div>"
        f"<figcaption class=small>{html.escape(text)}</figcaption></figure>"
    )


def png(figure: Figure, title: str) -> str:
    """A figure as inline PNG, for what has too many points for SVG; the figure is closed."""
    buffer = io.BytesIO()
    with style.styled():
        style.bare(figure).savefig(buffer, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def svg(figure: Figure, title: str) -> str:
    """A figure as inline SVG that scales with the page; the figure is closed."""
    buffer = io.StringIO()
    with style.styled():
        style.bare(figure).savefig(
            buffer, format="svg", metadata={"Date": None}, bbox_inches="tight"
        )
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    name = re.sub(r"\W", "", title) + hashlib.sha256(text.encode()).hexdigest()[:8]
    for attribute in ('id="', 'href="#', "url(#"):  # unique in the page
        text = text.replace(attribute, f"{attribute}{name}-")
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
