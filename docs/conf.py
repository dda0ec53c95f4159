"""How Sphinx builds the site: ``make docs``."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import options  # noqa: E402
import record_tables  # noqa: E402

from ptdbench.records import schema  # noqa: E402

project = "ptdbench"
author = "ptdbench"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "ptdbench"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

# What a reader types or saves has a copy button, and output has none. In a session only the commands are copied.
copybutton_selector = ", ".join(f"div.highlight-{language} pre" for language in ("sh", "console", "python", "yaml"))
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_copy_empty_lines = False

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"

# Everything that is referred to must be there, but for what other projects document.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|typing|hydra|numpy|np|pandas|pathlib)\b.*"),
    ("py:.*", r"ptdbench\.models\.materialize.*"),  # nothing that a user calls
]


def _expand(app: Any, name: str, source: list[str]) -> None:
    """Put the tables of options or of the record into a page that has their place."""
    if "<!-- options: " in source[0]:
        source[0] = options.expand(source[0])
        for path in options.CONF.glob("**/*.yaml"):
            app.env.note_dependency(str(path))
    if "<!-- record -->" in source[0]:
        source[0] = source[0].replace("<!-- record -->", record_tables.markdown())
        app.env.note_reread()


def _write_schema(app: Any, error: Exception | None) -> None:
    """Put the JSON Schema of a record beside its page."""
    Path(app.outdir, "record.schema.json").write_bytes(schema.json_schema())


def setup(app: Any) -> None:
    """Let Sphinx know."""
    app.connect("source-read", _expand)
    app.connect("build-finished", _write_schema)
