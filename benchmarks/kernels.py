"""Steps under ``kernels=fused`` and ``kernels=torch`` on virtual GPUs: the table of docs/kernels.md.

    make virtual-truth ARGS=kernels

Every model under every layout, eager and compiled, in bf16 with a batch that suits it, is planned for virtual H100. The
numbers of kernels and the memory are exact, and steps are predicted, see docs/plan.md. A ratio to ddp that the kernels
change by more than 3 % is bold.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import tables
from benchmarks.plan_truth import plan

PAGE = tables.ROOT / "docs/kernels.md"

#: Samples of each rank.
BATCHES = {"gpt_small": 16, "gpt_xl": 4, "llama_1b": 1}

LAYOUTS, RANKS = ("single", "ddp", "fsdp", "tp"), 2

#: How much of a ratio makes a difference.
DIFFERENCE = 0.03

COMMON = ("virtual=h100", "precision=bf16", "kernels=fused,torch", "compile=false,layers")

Step = Mapping[str, Any]


def main() -> int:
    """Plan all of them and write the page's table."""
    steps = {key: step for model in BATCHES for key, step in planned(model)}
    columns = ["model", "layout", "compile", "kernels", "", "memory GiB", "", "memory-bound ms", "", "step ms", ""]
    table = tables.drawn([*columns, "vs ddp", ""], [[*[""] * 3, *["fused", "torch"] * 5], *rows(steps)])
    tables.show(PAGE, "kernels", table)
    print(table)
    return 0


def planned(model: str) -> Iterator[tuple[tuple[str, str, str, str], Step]]:
    """Plan the layouts of a model, and yield each by model, layout, compilation and kernels."""
    for layouts, ranks in ((LAYOUTS[:1], 1), (LAYOUTS[1:], RANKS)):
        words = (f"model={model}", f"parallel={','.join(layouts)}", f"cluster.ranks_per_node={ranks}")
        batch = f"train.global_batch={BATCHES[model] * ranks}"
        for record in plan([*COMMON, *words, batch]).records:
            config = record["config"]
            yield (model, record["parallel"], str(config["compile"]).lower(), config["kernels"]), record


def rows(steps: dict[tuple[str, str, str, str], Step]) -> Iterator[list[str]]:
    """Yield a row for each model, layout and compilation, with the figures under both kinds of kernels."""
    for model, layout, compiled in dict.fromkeys(key[:3] for key in steps):
        both = [steps[model, layout, compiled, kernels] for kernels in ("fused", "torch")]
        of_ddp = [steps[model, "ddp", compiled, kernels] for kernels in ("fused", "torch")]
        counts = [f"{sum(counts[0] for counts in step['virtual']['kernels'].values()):,}" for step in both]
        memory = [f"{step['virtual']['allocated_bytes'][0] / 2**30:.1f}" for step in both]
        bound = [f"{step['predicted']['parts']['memory'] * 1e3:.1f}" for step in both]
        seconds = [f"{step['predicted']['step_seconds'] * 1e3:.1f}" for step in both]
        ratios = [speed(step) / speed(base) for step, base in zip(both, of_ddp, strict=True)]
        mark = "**" if abs(ratios[1] / ratios[0] - 1) > DIFFERENCE else ""
        shown = [f"{mark}{ratio:.2f}x{mark}" for ratio in ratios]
        yield [model, layout, compiled, *counts, *memory, *bound, *seconds, *shown]


def speed(step: Step) -> float:
    """Return the predicted tokens/s of each rank."""
    return float(step["predicted"]["tokens_per_second"] / step["world_size"])
