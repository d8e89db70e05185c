"""How many ranks work on different data, as far as the model's parameters show."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def data_parallel_size(model: nn.Module | None, world_size: int) -> int:
    """Ranks that are given different batches.

    Tensor parallelism is seen (parameters spread over a mesh that is not FSDP2's); context and pipeline parallelism
    leave no mark on parameters, so the user says.
    """
    parameter = next((p for p in model.parameters() if isinstance(p, DTensor)), None) if model is not None else None
    if model is None or parameter is None:
        return world_size
    sharded = next((size for module in model.modules() if (size := _fsdp_size(module))), None)
    if sharded is not None:
        return sharded
    mesh_size: int = parameter.device_mesh.size()
    return max(1, world_size // mesh_size)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether a rank holds only parts of the parameters: FSDP of either kind, tensor parallelism."""
    if model is None:
        return False
    return any(isinstance(p, DTensor | FlatParameter) for p in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def _fsdp_size(module: nn.Module) -> int | None:
    """Ranks that FSDP2 shards and replicates this module over."""
    if not isinstance(module, FSDPModule):
        return None
    groups: Any = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
    # Experts may be sharded over a smaller mesh than the rest.
    return max((int(group.mesh_info.mesh.size()) for group in groups), default=None)
