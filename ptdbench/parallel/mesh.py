"""The ranks as a grid: which of them hold replicas of each other, and which hold stages of one model."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptdbench.parallel.layout import Layout


def build(layout: Layout, device_type: str) -> DeviceMesh:
    """A mesh ``("data", "pipeline")``, or only ``("data",)`` where a replica is not cut into stages.

    Neighbouring ranks are stages of one replica, so that activations stay inside a node.
    """
    if layout.pipeline == 1:
        return init_device_mesh(device_type, (layout.data,), mesh_dim_names=("data",))
    return init_device_mesh(device_type, (layout.data, layout.pipeline), mesh_dim_names=("data", "pipeline"))
