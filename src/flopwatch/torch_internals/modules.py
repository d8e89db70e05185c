"""Private names of modules, of sharded modules and of the ranks' store."""

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from flopwatch.errors import MeasurementError
from flopwatch.torch_internals import CHECKS, declare

# --- Modules ----------------------------------------------------------------------------------------------------------

ANY_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class LocalBatchNorm(nn.SyncBatchNorm):
    """Batch norm for any number of dimensions, without communication; replaces synchronised batch norm in counting."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        uses_batch = self.training or self.running_mean is None
        means, variances = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return nn.functional.batch_norm(
            input, means, variances, self.weight, self.bias, uses_batch, self.momentum or 0.0, self.eps
        )


@functools.cache
def hook_tables() -> tuple[str, ...]:
    """Attributes in which a module keeps its forward and backward hooks, and their options."""
    tables = (name for name, held in vars(nn.Module()).items() if isinstance(held, dict))
    return tuple(name for name in tables if name.lstrip("_").startswith(("forward", "backward")))


COMPILED_CALL = declare("torch.nn.Module._compiled_call_impl")
"""`nn.Module.__call__` calls this attribute if it is set; `module.compile()` sets it."""


# No module is called to see whether the call is redirected: that would call the training's hooks for all modules.
CHECKS[(COMPILED_CALL,)] = lambda: getattr(nn.Module, COMPILED_CALL) is None


def compiled_call(module: nn.Module) -> Any:
    return getattr(module, COMPILED_CALL, None)


_CALL = declare("torch.nn.Module._call_impl")


def arguments_by_name(depth: int) -> dict[str, Any]:
    """The arguments that the running call of a module got by name. The hook of the call is `depth` functions above."""
    caller = sys._getframe(depth + 3)
    if caller.f_code is not _CALL_CODE:  # its locals are three, those of the function that calls hooks many
        caller = sys._getframe(depth + 1)
    found = caller.f_locals.get("kwargs")
    is_call = isinstance(found, dict) and caller.f_code.co_filename == _MODULE_FILE
    return cast("dict[str, Any]", found) if is_call else {}


_CALL_CODE, _MODULE_FILE = cast("Any", nn.Module.__call__).__code__, nn.modules.module.__file__

_TRANSFORMS = declare("torch._C._functorch")
_transforms = getattr(torch._C, _TRANSFORMS, None)
transform_level: Callable[[], Any] = getattr(_transforms, "maybe_current_level", lambda: None)
"""How many transformations of `torch.func`, such as `vmap`, the code runs in; None outside of them."""


def is_in_transform() -> bool:
    return transform_level() is not None


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of a tensor inside of a transformation, with the samples over which `torch.func.vmap` maps."""
    while cast("Any", _transforms).is_functorch_wrapped_tensor(tensor):
        tensor = cast("Any", _transforms).get_unwrapped(tensor)
    return tensor.shape


# --- Ranks ------------------------------------------------------------------------------------------------------------

_STORE = declare("torch.distributed.distributed_c10d._get_default_store")


def default_store() -> Any:
    """The key-value store of the default process group, which all ranks of the training share."""
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, _STORE, None)
    if found is None:
        raise MeasurementError(
            f"torch {torch.__version__} has no `{_STORE}`: the store is looked for at MASTER_ADDR and MASTER_PORT; "
            "if these are not set, each rank reports only itself"
        )
    return found()


_FSDP_STATE = declare("torch.distributed.fsdp.FSDPModule._get_fsdp_state")


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of a module that `fully_shard` has sharded; empty if they are not found.

    They are found by their public attribute `mesh_info`, because releases store one or several under different names.
    """
    state = getattr(module, _FSDP_STATE, lambda: None)()
    held = getattr(state, "__dict__", {}).values()
    groups = [one for each in held for one in (each if isinstance(each, list | tuple) else (each,))]
    return [group for group in groups if hasattr(group, "mesh_info")]
