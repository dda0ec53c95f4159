"""What won, for another program: torch's own calls, accelerate's YAML, torchtitan's options, from ``export.yaml``."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any

from omegaconf import OmegaConf

from ptdbench.parallel.dims import BatchPlan, Degrees
from ptdbench.parallel.options import Options
from ptdbench.parallel.replicas import bucket_size
from ptdbench.problems import Problem, require
from ptdbench.records.run_record import RunRecord

#: Options outside ``parallel`` that are part of a layout, and the values that need no mention.
_PLAIN = {
    "activations.name": "keep", "activations.every": 1, "activations.products": 2, "precision": "fp32",
    "compile": False, "offload": "none", "train.clip_norm": None, "kernels": "torch",
}  # fmt: skip

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(run: RunRecord, target: str) -> tuple[str, list[str]]:
    """Return a run's layout as the configuration of another program, which begins with remarks, and the remarks.

    Raises:
        ConfigError: The program has no such layout.
    """
    table: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("export.yaml")))
    plan, row = BatchPlan.of(run.written["layout"]), table[target]
    degrees = {name: size for name, size in plan.dims.degrees().items() if size > 1}
    alien = [name for name in degrees if name not in row["degrees"]]
    if target == "accelerate" and {"tensor", "context"} & {*degrees} and "shard" not in degrees:
        alien = alien or [*degrees]  # it splits products and sequences of sharded weights only
    able = [name for name, other in table.items() if name != target and {*degrees} <= {*other["degrees"]}]
    rule = f"cannot express {' and '.join(f'{name}={degrees[name]}' for name in alien)}, the layout of {run.directory}"
    require(Problem("--to", target, rule, f"try {' or '.join(able)}") if alien else None)
    parallel = run.config["parallel"]
    options = Options(**{option.name: parallel[option.name] for option in fields(Options) if option.name in parallel})
    carried = row["options"] | (row.get("sharded_options", {}) if options.shards(plan.dims) else {})
    lost = [
        f"{name.removesuffix('.name')}={value}"
        for name, value in _differing(run, options, degrees)
        if name not in carried or (carried[name] and value not in carried[name])
    ]
    shown = ", ".join(f"{name}={size}" for name, size in degrees.items()) or "one rank"
    remarks = [
        f"not carried over: {', '.join(lost) or 'nothing of the layout'}",
        "not part of it: model, data, optimizer and learning rate",
    ]
    head = f"{run.directory} for {target}: {shown}; {row['start']}"
    words = _words(run, plan, options)
    body = _filled(row["text"], _values(run, plan, options, words), words)
    return "".join(f"# {line}\n" for line in (head, *remarks)) + body, remarks


def _differing(run: RunRecord, options: Options, degrees: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Yield the options that have an effect, and differ from what other programs do by default."""
    rows = Degrees.rows()
    idle = {name for degree, row in rows.items() if degree not in degrees for name in row.options} | {*rows}
    for option in fields(Options):
        value = getattr(options, option.name)
        # Other programs exchange keys and values in context parallelism.
        if option.name not in idle and (value != option.default or option.name == "context_method"):
            yield f"parallel.{option.name}", value
    for name, plain in _PLAIN.items():
        if (value := run.option(name, Any)) not in (None, plain):
            yield name, value


def _words(run: RunRecord, plan: BatchPlan, options: Options) -> set[str]:
    """Return the words that hold, which select lines of a text."""
    dims, compiled, kept = plan.dims, run.option("compile", Any), run.option("activations.name", str)
    words = {
        "sharded": (is_sharded := options.shards(dims)), "compressed": not is_sharded and options.sent != "fp32",
        "several": dims.world_size > 1, "stages": dims.pipeline > 1, "cuda": run.environment.devices,
        "frees": options.reshard_after_forward, "sequence": options.sequence, "compile": compiled,
        "whole": compiled == "whole", "autotune": compiled == "autotune", "recompute": kept == "recompute",
        "selective": kept == "selective", "offload": run.option("offload", str) not in (None, "none"),
        "clip": run.option("train.clip_norm", Any), "tokens": run.tokens_per_sample,
    }  # fmt: skip
    return {word for word, holds in words.items() if holds}


def _values(run: RunRecord, plan: BatchPlan, options: Options, words: set[str]) -> dict[str, object]:
    """Return the values that a text refers to: of options, of the layout, and what follows from them."""
    precision, stride = run.precision or "fp32", run.option("activations.every", int) or 1
    narrow, bucket = precision == "bf16", options.bucket_mb
    mesh = {f"dp_{name}": size for name in ("replicate", "shard") if (size := getattr(plan.dims, name)) > 1}
    return {
        **vars(options), **plan.as_dict(), "world_size": plan.dims.world_size, "nodes": len(run.nodes) or 1,
        "shape": (*mesh.values(),) or (1,), "names": f"({', '.join(map(json.dumps, mesh or ['dp_replicate']))},)",
        "local_batch": plan.micro_batch * plan.microbatches, "length": run.tokens_per_sample,
        "clip_norm": run.option("train.clip_norm", Any), "recomputed": "layers" + f"[::{stride}]" * (stride > 1),
        "mode": 'mode="max-autotune-no-cudagraphs"' if "autotune" in words else "",
        "dtype": "torch.bfloat16" if narrow else None, "sent": f"torch.{_DTYPES[options.sent]}",
        "offload_policy": "CPUOffloadPolicy" if "offload" in words else "OffloadPolicy",
        "bucket": bucket_size(4 * (run.parameters or 0)) if bucket == "auto" else bucket,
        "graph": options.has_static_graph(plan), "find_unused": options.static_graph == "find_unused",
        "autocast": narrow and "sharded" not in words, "matmul": "high" if precision == "tf32" else "highest",
        "mixed": precision if precision in ("bf16", "fp16") else "no", "param": _DTYPES["bf16" if narrow else "fp32"],
        "pipelining": options.pipeline_schedule.kind.__name__.removeprefix("Schedule"),
    }  # fmt: skip


def _filled(text: str, values: dict[str, object], words: set[str]) -> str:
    """Return the lines whose words all hold, with the values."""
    kept = ""
    for line in text.splitlines():
        content, _, conditions = line.partition("  #? ")
        if all((word.removeprefix("!") in words) != word.startswith("!") for word in conditions.split()):
            kept += f"{content}\n"
    return Template(kept).substitute(values)
