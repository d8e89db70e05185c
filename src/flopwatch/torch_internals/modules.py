"""Where `nn.Module` keeps its parts, and private names of sharded modules and of the ranks' store."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from flopwatch.errors import MeasurementError
from flopwatch.torch_internals import CHECKS, apart, declare

# --- Modules ----------------------------------------------------------------------------------------------------------

ANY_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ANY_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class LocalBatchNorm(nn.SyncBatchNorm):
    """Batch norm for any number of dimensions, without communication; replaces synchronised batch norm in counting."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        uses_batch = self.training or self.running_mean is None
        means, variances = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return nn.functional.batch_norm(
            input, means, variances, self.weight, self.bias, uses_batch, self.momentum or 0.0, self.eps
        )


class ModuleTables(NamedTuple):
    """Where an `nn.Module` keeps what its public methods register: names of entries in its `__dict__`."""

    parameters: str
    buffers: str
    modules: str
    running_hooks: tuple[str, ...]
    """Those before and those after `forward`."""
    backward_hooks: tuple[str, ...]
    hook_options: tuple[str, ...]
    state: frozenset[str]
    """Attributes that torch sets, as opposed to the user's, and that a copy of a module gets separately."""


@functools.cache
def module_tables() -> ModuleTables:
    """Find the tables by registering something with the public methods. Raises MeasurementError if one is not found."""
    found: list[ModuleTables] = []

    def look() -> bool:
        found.append(_tables_of(nn.Module()))
        return True

    apart(look)
    if not found:
        raise MeasurementError(f"torch {torch.__version__} keeps the parameters of modules in an unknown place")
    return found[0]


def _tables_of(module: nn.Module) -> ModuleTables:
    handles: list[Any] = [
        module.register_forward_pre_hook(print, with_kwargs=True),  # no hook is called
        module.register_forward_hook(print, with_kwargs=True, always_call=True),
        module.register_full_backward_hook(print),
        module.register_full_backward_pre_hook(print),
    ]
    held = {name: value for name, value in vars(module).items() if isinstance(value, dict | set)}

    def keeper(value: Any, listed: Callable[[], Iterator[Any]]) -> str:
        """The table whose values torch lists. Nothing is registered, which would call the training's hooks for that."""
        for name, table in held.items():
            if isinstance(table, dict) and not table:
                table["it"] = value
                with suppress(AttributeError):  # torch takes it for a module
                    if any(each is value for each in listed()):
                        return name
                del table["it"]
        raise LookupError("what a module holds is kept elsewhere")

    hooks = [next(name for name, each in held.items() if each is handle.hooks_dict_ref()) for handle in handles]
    ids = [handle.id for handle in handles]
    options = tuple(name for name, each in held.items() if name not in hooks and any(key in each for key in ids))
    if len(options) < 3:
        raise LookupError("options of hooks are kept elsewhere")
    kept = (
        keeper(nn.Parameter(torch.empty(0)), module.parameters),
        keeper(torch.empty(0), module.buffers),
        keeper(nn.Module(), module.children),
    )
    state = frozenset((*kept, COMPILED_CALL, *hooks, *options))
    return ModuleTables(*kept, tuple(hooks[:2]), tuple(hooks[2:]), options, state)


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
    """Whether the code runs inside of a transformation of `torch.func`, such as `vmap`."""
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
