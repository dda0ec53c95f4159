"""Another shape than that of the checkpoint is named, and refused in the run's own place unless it is asked for."""

import math
from typing import Any

import pytest

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.setup import run_spec
from tests.refusals import Abridged, refusal_of


def layout(**degrees: int) -> dict[str, Any]:
    return BatchPlan(Dims(**degrees), global_batch=16, micro_batch=4).as_dict()


def checkpoint(world_size: int, *layouts: dict[str, Any]) -> Manifest:
    facts = {"segments": [{"first_step": 0, "steps": 3, "layout": one} for one in layouts]} if layouts else {}
    return Manifest(3, world_size, {"name": "toy"}, facts, {}, "2.14", 0.0)


@pytest.mark.parametrize(("was", "now", "change"), [
    (checkpoint(4, layout(replicate=2, shard=2)), layout(replicate=2, shard=2), None),
    (checkpoint(2, layout(shard=2)), layout(tensor=2), "2 ranks (tensor=2) instead of 2 ranks (shard=2)"),
    (checkpoint(2, layout(shard=2)), layout(), "1 rank instead of 2 ranks (shard=2)"),
    (checkpoint(2, layout(), layout(shard=2)), layout(shard=2), None),  # by the last start
    (checkpoint(2), layout(shard=2), None),  # which says nothing of segments
    (checkpoint(4, {"pipeline": 1}), layout(shard=2), "2 ranks (shard=2) instead of 4 ranks"),
])  # fmt: skip
def test_a_change_is_named_with_both_shapes(was, now, change):
    assert run_spec.change_of_shape(was, math.prod(now[degree] for degree in Dims.order()), now) == change


def summary(**degrees: int) -> dict[str, Any]:
    size = Dims(**degrees).world_size
    return {"world_size": size, "layout": layout(**degrees)}


def test_in_its_own_place_it_is_refused_with_what_to_type(tmp_path):
    path = tmp_path / "checkpoints" / "step-00000003"
    path.mkdir(parents=True)
    checkpoint_dir.write_manifest(path, checkpoint(4, layout(replicate=2, shard=2)))
    shapes = "2 ranks (replicate=2) instead of 4 ranks (replicate=2 shard=2)"
    told = f"reshape=false: {tmp_path} would continue with {shapes}, …; start it as before, set reshape=true, or …"
    assert refusal_of(run_spec.require_same_shape, tmp_path, summary(replicate=2), allowed=False) == Abridged(told)
    run_spec.require_same_shape(tmp_path, summary(replicate=2), allowed=True)
    run_spec.require_same_shape(tmp_path, summary(replicate=2, shard=2), allowed=False)
    run_spec.require_same_shape(tmp_path / "elsewhere", summary(replicate=2), allowed=False)
    run_spec.require_same_shape(tmp_path, {"world_size": 2}, allowed=False)
