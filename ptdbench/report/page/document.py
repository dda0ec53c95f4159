"""A report as one HTML file that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from ptdbench.records.files import strict

#: The files of the page beside this module.
_PARTS = {"style": "page.css", "script": "page.js"}


def document(title: str, subtitle: str, content: Mapping[str, Any]) -> str:
    """The page.

    Args:
        title: What it reports on.
        subtitle: When and by what it was made.
        content: Its data, from :func:`ptdbench.report.page.content.content`.
    """
    from plotly.offline import get_plotlyjs

    here = files(__package__)
    parts = {name: (here / file).read_text(encoding="utf-8") for name, file in _PARTS.items()}
    data = json.dumps(strict(content), allow_nan=False, separators=(",", ":"))
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        parts,
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        plotly=get_plotlyjs(),
        data=data.replace("<", "\\u003c"),  # so that no text of a record can end the element
    )
