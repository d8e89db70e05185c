"""Every private name of torch that flopwatch uses, why it is needed, and what happens in a release that lacks it.

Checked with torch 2.13.0. No other module of flopwatch uses a private name of torch (`tests/test_private_names.py`
checks this). If a torch release lacks a name:

- A *required* name raises a `MeasurementError` when it is first used. Importing flopwatch still works, `count_flops`
  reports which name is missing, and a training monitor reports the error once and continues without FLOPs.
- An *optional* name has a fallback, which is described next to it ("in torch releases without ...").
- Classes (`FakeTensor`, `TorchDispatchMode`, `OpOverload`) are imported directly, as every release since 2.1 has them.

Many of these functions run for every op of a model, so most are aliases or C-level getters instead of Python functions.
Private names of ATen ops (`aten::_scaled_mm`) are not in this module, because the formulas refer to them by strings. A
string that a release does not register never matches an op.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_kernel_invocation_manager
from torch.utils import _python_dispatch
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_any as tree_any
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from flopwatch.errors import MeasurementError

CHECKED_WITH = "2.13.0"

_C: Any = torch._C
_AUTOGRAD: Any = getattr(_C, "_autograd", None)


def required(owner: Any, name: str, purpose: str) -> Callable[..., Any]:
    """The attribute `name` of `owner`, or a function that raises an error about the missing name when it is called.

    >>> required(object(), "_gone", "to know X")()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    flopwatch.errors.MeasurementError: torch ... has no `_gone`, which flopwatch needs to know X; ...
    """
    found: Callable[..., Any] | None = getattr(owner, name, None)
    return found if found is not None else functools.partial(_missing, name, purpose)


def _missing(name: str, purpose: str, *_: Any, **__: Any) -> Any:
    raise MeasurementError(
        f"torch {torch.__version__} has no `{name}`, which flopwatch needs {purpose}; "
        f"use torch {CHECKED_WITH}, with which flopwatch was tested, or report an issue for this release of torch"
    )


# --- The dispatcher ---------------------------------------------------------------------------------------------------

# The schema has the qualified name of an op, the names and defaults of its arguments, and which arguments it writes to.
# The public `OpOverload.name()` is not used, because it appends the overload, and formulas apply to all overloads.
op_schema: Callable[[Any], Any] = attrgetter("_schema")
op_name: Callable[[Any], str] = attrgetter("_schema.name")
# All overloads of one op share a packet, so an op is recognised by its packet.
op_packet: Callable[[Any], Any] = attrgetter("_overloadpacket")
# The op's name without its namespace.
short_op_name: Callable[[Any], str] = attrgetter("_opname")
packet_name: Callable[[Any], str] = attrgetter("_qualified_op_name")
# Whether an op is written as a composition of other ops.
can_decompose: Callable[[Any], bool] = methodcaller("_can_decompose")


def aten_packet(name: str) -> Any:
    """An op of the aten namespace; if the torch release lacks it, an object that is equal to no op."""
    return getattr(torch.ops.aten, name, None) or object()


# Private ops, which users run through public functions such as `torch.nn.functional.ctc_loss`.
CTC_LOSS = aten_packet("_ctc_loss")
CTC_LOSS_BACKWARD = aten_packet("_ctc_loss_backward")
GROUPED_MM = aten_packet("_grouped_mm")
PIN_MEMORY = aten_packet("_pin_memory")
TO_COPY = aten_packet("_to_copy")
UNSAFE_VIEW = aten_packet("_unsafe_view")

# Switches off all dispatch modes, so that a mode of the user, such as another counter, does not see flopwatch's ops.
disable_current_modes: Callable[[], AbstractContextManager[Any]] = required(
    _python_dispatch, "_disable_current_modes", "to count without the active dispatch modes"
)
# flopwatch exits its dispatch mode only while this mode is on top of the stack, as torch requires.
current_dispatch_mode: Callable[[], Any] = required(
    _python_dispatch, "_get_current_dispatch_mode", "to leave its dispatch mode"
)
dispatch_mode_stack: Callable[[], Iterable[Any]] = required(
    _python_dispatch, "_get_current_dispatch_mode_stack", "to list the active dispatch modes"
)

_dispatch_key_for_device = required(_C, "_dispatch_key_for_device", "to find the kernels of an op")
_has_kernel_for_key = required(_C, "_dispatch_has_kernel_for_dispatch_key", "to find the kernels of an op")


def has_kernel(op: OpOverload[Any, Any], device_types: Iterable[str]) -> bool:
    """Whether an op has a kernel for one of these device types; torch has no public function for this."""
    return any(_has_kernel_for_key(op.name(), _dispatch_key_for_device(name)) for name in device_types)


def python_body(op: OpOverload[Any, Any]) -> Callable[..., Any] | None:
    """The Python function that `torch.library.custom_op` wraps; None if there are several for different devices.

    In torch releases without `OPDEFS` the result is None, and the op is reported as an op without a formula.
    """
    definition: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {}).get(op_name(op))
    if definition is None or set(getattr(definition, "_backend_fns", ())) != {None}:
        return None
    return cast("Callable[..., Any] | None", getattr(definition, "_init_fn", None))


# Whether autocast is on for any device type. If torch lacks this function, True lets the caller check each type.
is_any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", lambda: True)

# --- Tensors ----------------------------------------------------------------------------------------------------------

# A counter that every in-place write increments, by which a changed tensor is recognised without keeping a copy.
tensor_version: Callable[[torch.Tensor], int] = attrgetter("_version")
# The number of elements that a sparse tensor stores. The public `values()` raises if the tensor is not coalesced.
stored_count: Callable[[torch.Tensor], int] = methodcaller("_nnz")
coo_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
# The sizes of all components of a nested tensor in one call.
nested_sizes: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_nested_tensor_size")
# Hooks on a tensor's gradient; None if there are none.
gradient_hooks: Callable[[torch.Tensor], Mapping[int, Any] | None] = attrgetter("_backward_hooks")

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""The logger in which torch writes a long message about an op with wrong shapes, before it raises the error."""


def storage_identity(tensor: torch.Tensor) -> int:
    """The address of the storage's C++ object. Views share it, and unlike `data_ptr()`, it exists for meta tensors."""
    return int(tensor.untyped_storage()._cdata)


def mark_as_parameter(fake: torch.Tensor) -> None:
    """Make `isinstance(fake, nn.Parameter)` true. Calling `nn.Parameter(fake)` would run an op that is counted."""
    fake._is_param = True


# --- Autograd ---------------------------------------------------------------------------------------------------------

# The id is -1 outside of a backward pass, which distinguishes forward ops from backward ops.
current_graph_task_id: Callable[[], int] = required(
    _C, "_current_graph_task_id", "to distinguish forward and backward ops"
)
# The autograd node that is running. A backward op is attributed to the module whose forward pass created this node.
current_autograd_node: Callable[[], Any] = required(
    _C, "_current_autograd_node", "to attribute the backward pass to modules"
)
# The number that the next autograd node of this thread will get.
next_sequence_nr: Callable[[], int] = required(
    _AUTOGRAD, "_get_sequence_nr", "to attribute the backward pass to modules"
)
# The number of autograd nodes that this thread has made. The live monitor compares it between steps, to notice ops
# outside of model calls. In torch releases without `_get_sequence_nr` it is None, and such ops are not noticed.
recorded_operations: Callable[[], int | None] = getattr(_AUTOGRAD, "_get_sequence_nr", lambda: None)
# The sequence number that a node got when its forward op ran.
sequence_nr: Callable[[Any], int] = methodcaller("_sequence_nr")
# Returns the active pack and unpack hooks for saved tensors. With the argument False, it also does so during tracing.
_top_saved_tensors_hooks = required(
    _AUTOGRAD, "_top_saved_tensors_default_hooks", "to find the active hooks for saved tensors"
)
# The function that `Tensor.backward` calls. It is called directly, because `Tensor.backward` disables function modes.
engine_run_backward = required(torch.autograd.graph, "_engine_run_backward", "to run the backward pass")

ENGINE_CODE: CodeType | None = getattr(engine_run_backward, "__code__", None)
"""Code object of the function that starts a backward pass. A search of the stack ends at its frame, or at the last."""
APPLY_CODE: CodeType = cast("Any", torch.autograd.Function.apply).__func__.__code__
"""Code object of the frame where the forward pass of a custom autograd function begins."""


def saved_tensor_hooks() -> Any:
    """The active (pack, unpack) hooks for saved tensors, or None."""
    return _top_saved_tensors_hooks(False)


def is_checkpoint_recomputing() -> bool:
    """Whether `torch.utils.checkpoint` is recomputing a part of the forward pass.

    Torch's hook for saved tensors is then `_recomputation_hook`. In torch releases that do not have this hook,
    recomputation is recognised by grad mode and module calls, which fails if the forward pass computes gradients.
    """
    hooks = saved_tensor_hooks()
    return bool(hooks) and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def runs_forward_code(code: CodeType) -> bool:
    """Whether `code` belongs to `nn.Module.__call__` or to checkpointing, which run only in a forward pass."""
    return code.co_name == "_call_impl" or code.co_filename.endswith("torch/utils/checkpoint.py")


def input_metadata(node: Any) -> Any:
    """Shapes and dtypes of the gradients that a node takes; empty in torch releases without `_input_metadata`."""
    return getattr(node, "_input_metadata", ())


# --- Modules ----------------------------------------------------------------------------------------------------------

# The base classes of all batch norms and of all dropouts, for which torch has no public names.
AnyBatchNorm = nn.modules.batchnorm._BatchNorm
AnyDropout = nn.modules.dropout._DropoutNd

# A module's own parameters, buffers and children by name. Unlike the public iterators, these dicts include None values
# and nothing of the children.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
COMPILED_CALL = "_compiled_call_impl"
"""`nn.Module.__call__` prefers this attribute to `_call_impl`; `module.compile()` sets it."""
NON_PERSISTENT_BUFFERS = "_non_persistent_buffers_set"

FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
HOOK_OPTION_TABLES = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
BACKWARD_HOOK_TABLES = ("_backward_hooks", "_backward_pre_hooks")
HOOK_TABLES = (FORWARD_PRE_HOOKS, FORWARD_HOOKS, *HOOK_OPTION_TABLES, *BACKWARD_HOOK_TABLES)
MODULE_STATE = frozenset((PARAMETERS, BUFFERS, MODULES, COMPILED_CALL, *HOOK_TABLES))
"""Attributes in the `__dict__` of an `nn.Module` that torch sets, as opposed to the user's attributes."""


class LocalBatchNorm(AnyBatchNorm):
    """Batch norm for any number of dimensions, without communication; replaces synchronised batch norm in counting."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        return None


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the hooks and the forward of a module, as `module(...)` does if the module is not compiled."""
    return module._call_impl(*args, **kwargs)


def compiled_call(module: nn.Module) -> Any:
    """The compiled function that `module.compile()` has set on the module, or None."""
    return getattr(module, COMPILED_CALL, None)


def compiled_original(value: Any) -> nn.Module | None:
    """The module inside `torch.compile(module)`; None in torch releases without `_orig_mod`."""
    original = getattr(value, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else None


def is_compiled_function(value: Any) -> bool:
    """Whether `value` is a compiled function; False in torch releases without `_torchdynamo_orig_callable`."""
    return hasattr(value, "_torchdynamo_orig_callable")


def global_hook_tables() -> list[OrderedDict[int, Any]]:
    """The non-empty tables of hooks that are registered for all modules; empty in torch releases without them."""
    tables = [table for name, table in vars(nn.modules.module).items() if name.startswith("_global_")]
    return [table for table in tables if isinstance(table, OrderedDict) and table]


def class_before_sharding(cls: type[nn.Module]) -> type[nn.Module]:
    """The user's class of a sharded module. `fully_shard` creates a class with the bases (FSDPModule, user's class)."""
    return cast("type[nn.Module]", cls.__mro__[2])


# --- Attention --------------------------------------------------------------------------------------------------------

# The higher-order op that `flex_attention` calls. In torch releases without it, this is None and matches no op.
flex_attention_op: Any = getattr(sys.modules.get("torch._higher_order_ops.flex_attention"), "flex_attention", None)
# The kernel that `scaled_dot_product_attention` would choose, as the integer value of an `SDPBackend`.
fused_sdp_choice: Callable[..., int] = required(torch, "_fused_sdp_choice", "to know which attention kernel runs")


def mask_over_indices(mask_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Vectorise a mask function of four indices, as the public `create_mask` does, but for a selection of rows."""
    from torch.nn.attention import flex_attention

    vmap = required(flex_attention, "_vmap_for_bhqkv", "to count the pairs that a mask function does not mask")
    return cast("Callable[..., torch.Tensor]", vmap(mask_mod, prefix=()))


def is_identity_score(score_mod: Any) -> bool:
    """Whether `flex_attention` was called without a `score_mod`. False in torch releases without `_identity`."""
    return getattr(score_mod, "__name__", "") == "_identity"


def is_flex_device_check(frame: FrameType) -> bool:
    """Whether `frame` is the check in `flex_attention` that its backward pass supports the device."""
    is_check = frame.f_code.co_name == "_validate_device"
    return is_check and frame.f_globals["__name__"] == "torch.nn.attention.flex_attention"


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compile_tables() -> tuple[Mapping[Any, Any], Mapping[str, Any]] | None:
    """Torch's table of requested compilations, and its counters of finished ones; None if the compiler is not loaded.

    In torch releases without `cached_backends` or `counters`, the missing mapping is empty.
    """
    if "torch._dynamo.eval_frame" not in sys.modules or "torch._dynamo.utils" not in sys.modules:
        return None
    requested = getattr(sys.modules["torch._dynamo.eval_frame"], "cached_backends", {})
    return requested, getattr(sys.modules["torch._dynamo.utils"], "counters", {})


def compile_stance() -> Any:
    """The stance that `torch.compiler.set_stance` has set; None in torch releases without the private `_stance`."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


# --- Ranks ------------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The key-value store of the default process group, which all ranks of the training share."""
    from torch.distributed import distributed_c10d

    return required(distributed_c10d, "_get_default_store", "to connect the ranks of a training")()


def gloo_group(store: Any, rank: int, world_size: int, *, device: Any, timeout: Any) -> Any:
    """A gloo process group with its own timeout. Unlike the public `new_group`, it does not wait for other ranks."""
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo
    options = required(gloo, "_Options", "to create its own process group")()
    options._devices = [device]
    options._timeout = timeout
    return gloo(store, rank, world_size, options)


def fsdp_groups(module: Any) -> Iterable[Any]:
    """The parameter groups of a module that `fully_shard` has sharded; empty in torch releases without such groups."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # earlier torch releases have one group per module
        single = getattr(state, "_fsdp_param_group", None)
        groups = () if single is None else (single,)
    return cast("Iterable[Any]", groups)
