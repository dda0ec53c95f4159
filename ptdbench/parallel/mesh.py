"""The mesh of ranks: who shares what with whom."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

from ptdbench.parallel.dims import Dims


class Mesh:
    """The mesh of ranks, seen from one of them.

    ``mesh["tensor"]`` is the group of ranks that share each matrix product, or ``None`` if none do; likewise for each
    degree.
    """

    def __init__(self, dims: Dims, device_type: str) -> None:
        _forget_plans()
        names = dims.of_mesh()
        grid = init_device_mesh(device_type, tuple(getattr(dims, name) for name in names), mesh_dim_names=names)

        def flat(*wanted: str) -> DeviceMesh:
            present = dims.of_mesh(*wanted)
            return grid[present] if len(present) == 1 else grid[present]._flatten("_".join(present))

        self.batch = flat(*dims.order("samples"))  #: The ranks with the same part of the model and different samples.
        #: The ranks over which gradients of unsharded weights are averaged: they differ in samples, or in the positions
        #: of a sequence.
        self.copies = flat(*dims.order("samples", "positions"))
        copies = [flat(*dims.copied())] if dims.copies > 1 else []

        def in_each_copy(shards: DeviceMesh) -> DeviceMesh:
            """Prepend the dimension of copies, if there are several copies of the model."""
            return DeviceMesh._concatenate([*copies, shards]) if copies else shards

        #: The ranks over which weights are sharded, in each copy of the model.
        self.shard = in_each_copy(flat(*dims.order("weights"))) if {*dims.order("weights")} & {*names} else self.batch
        #: For each degree above 1 that regroups others, their ranks in two dimensions: ``<name>_copies``, those with
        #: the same share, and ``<name>``, those that share.
        self.regrouped = {}
        for name, row in dims.rows().items():
            if row.regroups and (size := getattr(dims, name)) > 1:
                ranks = flat(*(other for other in dims.order() if other in row.regroups))
                self.regrouped[name] = ranks._unflatten(0, (dims.regroup_copies(name), size), (f"{name}_copies", name))
        fold = self.regrouped.get("expert")
        #: Like ``shard``, for experts that are divided among ranks.
        self.experts = in_each_copy(fold["expert_copies"]) if fold else self.shard
        self._views = {name: grid[name] for name in names} | {name: fold[name] for name, fold in self.regrouped.items()}
        self._degrees = dims.rows()

    def __getitem__(self, degree: str) -> DeviceMesh | None:
        return self._views.get(degree) if degree in self._degrees else self._views[degree]

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups of this rank, in the same order on all ranks."""
        groups = {"copies": self.copies.get_group(), "shard": self.shard.get_group(self.shard.ndim - 1)}
        return groups | {name: view.get_group() for name, view in self._views.items() if name not in groups}


def _forget_plans() -> None:
    """Clear DTensor's cached plans: torch keys them by the shape of a mesh, and they hold its process groups.

    When ranks run one run of a sweep after another, the groups of the previous run no longer exist.
    """
    # As torch.distributed.tensor.debug does, which takes half a second to import.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
