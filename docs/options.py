"""Pages of options, made from the files of conf/: each option with its default and the comment beside it.

A page of docs/options/ holds a line ``<!-- options: GROUP -->``, which :func:`expand` replaces. What the docstring of a
choice's class says about its options stands there too, so that an option is described once: where it is declared.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ptdbench.records.effects import OF_CHOICE
from ptdbench.setup.compose import conf_folder

CONF = conf_folder()

#: Keys that make a choice what it is, and are no options.
NO_OPTIONS = ("defaults", "hydra", *OF_CHOICE)

COMMENT = re.compile(r"\s#\s?(.*)$")
#: A field of a class with the ``#:`` comment above or beside it.
FIELD = re.compile(r"^((?: {4}#: .*\n)*) {4}(\w+): [^#\n]*(?:#: (.*))?$", re.MULTILINE)
CODE = re.compile(r"(`+[^`]+`+)")


@dataclass(frozen=True)
class Option:
    """One line of a YAML file: a name relative to the file, the value as it is written, and the comment."""

    name: str
    value: str
    comment: str


@dataclass(frozen=True)
class Choice:
    """One file of a group.

    Attributes:
        name: The word on the command line.
        header: The comment at its top as Markdown: what it is, and commands that take it.
        target: The class or function that it names; empty where it names none.
        inherits: Other choices of the group that it starts from.
        base: The file of conf/ whose options all choices of the group have; empty where there is none.
        chooses: Choices of other groups that it makes, as ``data=digits``.
        options: What it sets, in order.
    """

    name: str
    header: str
    target: str
    inherits: tuple[str, ...]
    base: str
    chooses: tuple[str, ...]
    options: tuple[Option, ...]


def expand(page: str) -> str:
    """The page with every ``<!-- options: GROUP -->`` replaced; ``root`` is conf/config.yaml."""
    return re.sub(r"<!-- options: (\w+) -->", lambda found: markdown(found[1]), page)


def markdown(group: str) -> str:
    """All choices of a group, choices of one class with the same options in one table."""
    if group == "root":
        return _root()
    choices = [read(path, group) for path in sorted((CONF / group).glob("*.yaml"))]
    families: dict[tuple[str, ...], list[Choice]] = {}
    for choice in choices:
        key = (choice.target, *(o.name for o in choice.options)) if choice.target else (choice.name,)
        families.setdefault(key, []).append(choice)
    sections = [_choice(f[0]) if len(f) == 1 else _family(f, group) for f in families.values()]
    for base in dict.fromkeys(choice.base for choice in choices if choice.base):
        sections.append(_choice(replace(read(CONF / f"{base}.yaml", group), name="Options of every choice")))
    return "\n\n".join(sections)


def read(path: Path, group: str) -> Choice:
    """A file of conf/, or ``conf/config.yaml`` with an empty ``group``."""
    text = path.read_text()
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(tree, yaml.MappingNode)
    is_global = "# @package _global_" in text
    content = yaml.safe_load(text)
    own = content.get(group, {}) if is_global else content
    target = own.get("_target_", "") if isinstance(own, dict) else ""
    names = [e for e in content.get("defaults", []) if isinstance(e, str) and e != "_self_"]
    bases = [e.strip("/").partition("@")[0] for e in names if e.startswith("/")]
    overrides = [next(iter(e.items())) for e in content.get("defaults", []) if isinstance(e, dict)]
    chosen = [(re.match(r"override /(\w+)", key), value) for key, value in overrides]
    prefix = "" if is_global or not group else f"{group}."
    options = [o for o in _options(tree, text.splitlines(), prefix) if not o.name.startswith(f"{group}.name")]
    return Choice(
        name=path.stem,
        header=_header(text),
        target=target,
        inherits=tuple(e for e in names if not e.startswith("/")),
        base=next(iter(bases), ""),
        chooses=tuple(f"{found[1]}={value}" for found, value in chosen if found),
        options=tuple(options),
    )


def described(target: str) -> dict[str, str]:
    """What a class of ptdbench says of its arguments in its docstring, or of its fields beside them, as Markdown."""
    module, _, name = target.rpartition(".")
    if not module.startswith("ptdbench."):
        return {}
    kind = getattr(importlib.import_module(module), name)
    text, source = inspect.getdoc(kind) or "", inspect.getsource(kind)
    found = {field: beside or above.replace("#:", "") for above, field, beside in FIELD.findall(source)}
    for section in re.findall(r"^(?:Attributes|Args):\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE):
        for name, words in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
            found[name] = words
    plain = {name: re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", " ".join(found[name].split())) for name in found}
    return {name: _escaped(words) for name, words in plain.items()}


def _options(node: yaml.MappingNode, lines: Sequence[str], prefix: str) -> Iterator[Option]:
    for key, value in node.value:
        if key.value in NO_OPTIONS:
            continue
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _options(value, lines, f"{prefix}{key.value}.")
        else:
            yield Option(f"{prefix}{key.value}", _written(value, lines), _comment(key.start_mark.line, lines))


def _written(node: yaml.Node, lines: Sequence[str]) -> str:
    """The value as it stands in the file, a list of several lines in one."""
    start, end = node.start_mark, node.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    return f"[{', '.join(child.value for child in node.value)}]"


def _comment(line: int, lines: Sequence[str]) -> str:
    """The comment beside a key, and the lines of nothing but comment that continue it."""
    found = COMMENT.search(lines[line])
    if not found:
        return ""
    words = [found[1]]
    for below in lines[line + 1 :]:
        if not re.match(r"\s+#", below):
            break
        words.append(below.strip().lstrip("# "))
    return _escaped(" ".join(words).strip())


def _header(text: str) -> str:
    """The comment at the top of a file; indented lines of it are commands."""
    found = re.match(r"(?:#.*\n)+", text)
    lines = [line[2:] for line in (found[0] if found else "").splitlines() if not line.startswith("# @package")]
    parts: list[str] = []
    for is_command, block in _runs(lines):
        parts.append("```sh\n" + "\n".join(block) + "\n```" if is_command else _escaped("\n".join(block)))
    return "\n\n".join(parts)


def _runs(lines: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Neighboring lines of one kind, commands or not; empty lines separate."""
    block: list[str] = []
    kind = False
    for line in [*lines, ""]:
        is_command = line.startswith("  ")
        if block and (not line.strip() or is_command != kind):
            yield kind, block
            block = []
        if line.strip():
            kind = is_command
            block.append(line.strip())


def _choice(choice: Choice) -> str:
    texts = described(choice.target)
    parts = [f"## {choice.name}", choice.header]
    if choice.inherits:
        parts.append("Inherits " + ", ".join(f"[{name}](#{name})" for name in choice.inherits) + ".")
    if choice.chooses:
        parts.append("Chooses " + ", ".join(f"`{word}`" for word in choice.chooses) + ".")
    if choice.options:
        rows = [(f"`{o.name}`", f"`{o.value}`", _meaning(o, texts)) for o in choice.options]
        parts.append(_table(("option", "default" if choice.target else "value", "description"), rows))
    return "\n\n".join(parts)


def _family(choices: list[Choice], group: str) -> str:
    """Choices of one class with the same options: the options once, then their values."""
    choices = sorted(choices, key=lambda choice: [int(o.value) for o in choice.options if o.value.isdigit()])
    texts = described(choices[0].target)
    options = choices[0].options
    meanings = [(f"`{o.name}`", _meaning(o, texts)) for o in options]
    values = [[f"`{choice.name}`", *(f"`{o.value}`" for o in choice.options)] for choice in choices]
    head = [group, *(f"`{_last(o)}`" for o in options)]
    if len(options) > len(choices):
        head, *values = [list(column) for column in zip(head, *values, strict=True)]
    names = [f"- `{choice.name}`: " + choice.header.partition("\n\n```")[0].replace("\n", " ") for choice in choices]
    title = choices[0].target.rpartition(".")[2]
    tables = [_table(("option", "description"), meanings), _table(head, values)]
    return "\n\n".join([f"## {title}", "\n".join(names), *tables])


def _meaning(option: Option, texts: dict[str, str]) -> str:
    """The fuller one of the comment in its file and the docstring of its class."""
    return max(option.comment, texts.get(_last(option), ""), key=len)


def _root() -> str:
    """The groups with the choice that is made by default, then the options of conf/config.yaml."""
    text = (CONF / "config.yaml").read_text()
    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    defaults = next(value for key, value in tree.value if key.value == "defaults")
    groups = []
    for entry in defaults.value:
        if isinstance(entry, yaml.MappingNode) and not entry.value[0][0].value.startswith("override"):
            key, value = entry.value[0]
            meaning = _comment(key.start_mark.line, text.splitlines()).rpartition(":")[0]
            groups.append((f"[`{key.value}`]({key.value}.md)", f"`{value.value}`", meaning))
    options = read(CONF / "config.yaml", "").options
    rows = [(f"`{o.name}`", f"`{o.value}`", o.comment) for o in options]
    head = ("option", "default", "description")
    return f"## Groups\n\n{_table(('group', *head[1:]), groups)}\n\n## Options of every run\n\n{_table(head, rows)}"


def _last(option: Option) -> str:
    return option.name.rpartition(".")[2]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; without its last column where that says nothing."""
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Plain text as Markdown; what stands in backticks is code."""
    parts = CODE.split(text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", p) for p in parts)
