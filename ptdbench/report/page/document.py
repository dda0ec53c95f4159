"""A report as one HTML file that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from ptdbench.records.files import strict

#: The program of the page, in this order.
_SCRIPTS = ("words.js", "columns.js", "tables.js", "drawings.js", "figures.js", "main.js")


def document(title: str, subtitle: str, content: Mapping[str, Any]) -> str:
    """The page.

    Args:
        title: What it reports on.
        subtitle: When and by what it was made.
        content: Its data, from :func:`ptdbench.report.page.content.content`.
    """
    from plotly.offline import get_plotlyjs

    data = json.dumps(strict(content), allow_nan=False, separators=(",", ":"))
    return Template(_part("page.html")).substitute(
        style=_part("page.css"),
        script="\n".join(map(_part, _SCRIPTS)),
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        plotly=get_plotlyjs(),
        data=data.replace("<", "\\u003c"),  # so that no text of a record can end the element
    )


def _part(name: str) -> str:
    """A file of the page, beside this module."""
    return (files(__package__) / name).read_text(encoding="utf-8")
