"""Reasons why runs did not end well, as they stand below a table."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ptdbench.records import schema
from ptdbench.records.failure import TRACEBACK
from ptdbench.records.record import option
from ptdbench.records.schema import Layout, Written, part

#: Stands in a message before the path of what the run's processes wrote.
OUTPUT = "; its output is in "

#: What may be behind a failure of a rank that computes nothing.
_ON_VIRTUAL = "virtual GPUs compute nothing, and what decides by the values of tensors fails there"

#: Characters of a message proper that are shown; the record has all of it.
_LIMIT = 1000


def reason(record: Written) -> str:
    """Status, rank and error in one line: ``failed on rank 1: RuntimeError: ... at mymodels.py:13 in forward``.

    A long message is cut, but never a refusal, which ends with its remedy, nor what comes behind the message: the path
    behind :data:`OUTPUT`, where in the user's code it was, and what to try.
    """
    error = schema.error(record)
    where = f" on rank {error.rank}" if error.rank >= 0 else ""  # negative: the process that starts the ranks
    message, *output = error.message.split(OUTPUT)
    kind = error.type
    text = ": ".join(filter(None, (kind, " ".join(message.split()) if kind == "ConfigError" else _cut(message))))
    said = OUTPUT.join([f"{record['status']}{where}: {text or 'no reason on record'}", *output])
    if frame := error.where:
        path = Path(record["directory"]) / TRACEBACK
        shown = os.path.relpath(path) if Path.cwd() in path.absolute().parents else path
        said += f" at {frame}; the whole traceback is in {shown}"
    if record.get("kind") == "virtual" and record["status"] == "failed" and error.rank != -1:
        said += f"; {_ON_VIRTUAL}"
    remedies = ", ".join(_against_lack_of_memory(record)) if record["status"] == "oom" else ""
    return f"{said}; try {remedies}" if remedies else said


def _against_lack_of_memory(record: Written) -> Iterator[str]:
    """Options that need less memory than those of a run that trains."""
    if not record.get("model") or record.get("kind") == "planned":  # whose message says what fits
        return
    if (part(record, Layout).micro_batch or 1) > 1 and not record.get("micro_batch"):
        if record.get("launcher") in (None, "local") or option(record, "cluster.submit", str):
            yield "train.micro_batch=max, which finds what fits"
        else:  # what has started the ranks does so once
            yield "the train.micro_batch that ptdbench plan finds"
    if record.get("parallel") in ("single", "ddp"):
        yield "parallel=fsdp"
    if option(record, "activations.name", str) == "keep":
        yield "activations=recompute"
    if record.get("precision") == "fp32":
        yield "precision=bf16"


def wrap(text: str, width: int | None) -> str:
    """The text in lines of at most ``width`` columns, all but the first indented; words, such as a path, stay whole."""
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _cut(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LIMIT else f"{line[:_LIMIT].rstrip()} ..."
