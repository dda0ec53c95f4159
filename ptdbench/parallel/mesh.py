"""The mesh of ranks: who shares what with whom."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

from ptdbench.parallel.dims import Dims


class Mesh:
    """The mesh of ranks, seen from one of them.

    ``mesh["tp"]`` is this rank's group in a dimension, or ``None`` if its degree is 1; likewise ``dp_replicate``,
    ``dp_shard``, ``cp``, ``pp`` and ``ep``.
    """

    def __init__(self, dims: Dims, device_type: str) -> None:
        _forget_plans()
        degrees, dimension = dims.of_mesh(), {name: row.dimension for name, row in dims.rows().items()}
        names = tuple(dimension[name] for name in degrees)
        grid = init_device_mesh(device_type, tuple(getattr(dims, name) for name in degrees), mesh_dim_names=names)

        def flat(*wanted: str) -> DeviceMesh:
            present = tuple(dimension[name] for name in dims.of_mesh(*wanted))
            return grid[present] if len(present) == 1 else grid[present]._flatten("_".join(present))

        self.dp = flat(*dims.order("samples"))  #: The ranks with the same part of the model and different samples.
        #: The ranks that differ in samples or positions: gradients of unsharded weights are averaged over them.
        self.dp_cp = flat(*dims.order("samples", "positions"))
        copies = [flat(*dims.copied())] if dims.copies > 1 else []

        def in_each_copy(shards: DeviceMesh) -> DeviceMesh:
            """Prepend the dimension of replicas, if there are several."""
            return DeviceMesh._concatenate([*copies, shards]) if copies else shards

        #: The ranks over which weights are sharded, in each replica of the model.
        self.fsdp = in_each_copy(flat(*dims.order("weights"))) if {*dims.order("weights")} & {*degrees} else self.dp
        #: For each degree above 1 that regroups others, by its dimension: their ranks in two dimensions,
        #: ``<dimension>_copies``, those with the same share, and ``<dimension>``, those that share.
        self.regrouped = {}
        for name, row in dims.rows().items():
            if row.regroups and (size := getattr(dims, name)) > 1:
                ranks = flat(*(other for other in dims.order() if other in row.regroups))
                shape = dims.regroup_copies(name), size
                self.regrouped[row.dimension] = ranks._unflatten(0, shape, (f"{row.dimension}_copies", row.dimension))
        fold = self.regrouped.get("ep")
        #: Like ``fsdp``, for experts that ranks share.
        self.ep_fsdp = in_each_copy(fold["ep_copies"]) if fold else self.fsdp
        self._views = {name: grid[name] for name in names} | {name: fold[name] for name, fold in self.regrouped.items()}
        self._dimensions = {*dimension.values()}

    def __getitem__(self, dimension: str) -> DeviceMesh | None:
        return self._views.get(dimension) if dimension in self._dimensions else self._views[dimension]

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups that communicate in a step, in the same order on all ranks."""
        groups = {"dp_cp": self.dp_cp.get_group(), "fsdp": self.fsdp.get_group(self.fsdp.ndim - 1)}
        return groups | {name: view.get_group() for name, view in self._views.items() if name != "dp_shard"}


def _forget_plans() -> None:
    """Clear DTensor's plans, cached by mesh shape: their process groups no longer exist in the next run of a sweep."""
    # As torch.distributed.tensor.debug does, which takes half a second to import.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
