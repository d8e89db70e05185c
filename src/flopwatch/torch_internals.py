"""Every private name of torch that flopwatch uses: why, and what happens in a release that lacks it.

Checked with torch 2.13.0. Nothing outside this module uses a name of torch that begins with an underscore
(`tests/test_private_names.py`). Three rules cover a name that is missing:

- A *required* name raises a `MeasurementError` that names it at its first use: importing flopwatch works, `count_flops`
  says what is missing, and a training monitor reports the failure once and goes on without FLOPs.
- An *optional* name has a fallback beside its definition.
- Classes (`FakeTensor`, `TorchDispatchMode`, `OpOverload`) are imported directly: every release since 2.1 has them.

Hot paths call many of these per op, so most are plain aliases or C-level getters instead of Python functions.
Names of ATen ops (`aten::_scaled_mm`) are data of the dispatcher, not Python names: formulas keep them as strings, and
a string that a release does not register matches nothing.
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
    """The function of this name, or one that raises an error which names it.

    >>> required(object(), "_gone", "to know X")()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    flopwatch.errors.MeasurementError: torch ... has no `_gone`, which flopwatch needs to know X; ...
    """
    found: Callable[..., Any] | None = getattr(owner, name, None)
    return found if found is not None else functools.partial(_missing, name, purpose)


def _missing(name: str, purpose: str, *_: Any, **__: Any) -> Any:
    raise MeasurementError(
        f"torch {torch.__version__} has no `{name}`, which flopwatch needs {purpose}; "
        f"use torch {CHECKED_WITH}, with which flopwatch was checked, or report this release"
    )


# --- The dispatcher ---------------------------------------------------------------------------------------------------

# The schema has an op's qualified name, its arguments' names and defaults, and which of them it writes to; the public
# `OpOverload.name()` appends the overload, which formulas do not distinguish.
op_schema: Callable[[Any], Any] = attrgetter("_schema")
op_name: Callable[[Any], str] = attrgetter("_schema.name")
# All overloads of one op share a packet. Sets of packets are how ops are recognised.
op_packet: Callable[[Any], Any] = attrgetter("_overloadpacket")
# The name without its namespace, which `OpOverload` keeps ready.
short_op_name: Callable[[Any], str] = attrgetter("_opname")
packet_name: Callable[[Any], str] = attrgetter("_qualified_op_name")
# Whether an op is written as a composition of other ops.
can_decompose: Callable[[Any], bool] = methodcaller("_can_decompose")


def aten_packet(name: str) -> Any:
    """An op of the aten namespace; where a release does not have it, an object that is equal to no op."""
    return getattr(torch.ops.aten, name, None) or object()


# Ops whose names begin with an underscore because torch's own functions call them, not users.
CTC_LOSS = aten_packet("_ctc_loss")
CTC_LOSS_BACKWARD = aten_packet("_ctc_loss_backward")
GROUPED_MM = aten_packet("_grouped_mm")
PIN_MEMORY = aten_packet("_pin_memory")
TO_COPY = aten_packet("_to_copy")
UNSAFE_VIEW = aten_packet("_unsafe_view")

# A count must not be seen by dispatch modes of the user, and must see none of theirs.
disable_current_modes: Callable[[], AbstractContextManager[Any]] = required(
    _python_dispatch, "_disable_current_modes", "to count without the dispatch modes that are on"
)
# A mode of ours may only be left while it is on top of the stack.
current_dispatch_mode: Callable[[], Any] = required(
    _python_dispatch, "_get_current_dispatch_mode", "to leave its dispatch mode"
)
dispatch_mode_stack: Callable[[], Iterable[Any]] = required(
    _python_dispatch, "_get_current_dispatch_mode_stack", "to see which dispatch modes are on"
)

_dispatch_key_for_device = required(_C, "_dispatch_key_for_device", "to tell which kernels an op has")
_has_kernel_for_key = required(_C, "_dispatch_has_kernel_for_dispatch_key", "to tell which kernels an op has")


def has_kernel(op: OpOverload[Any, Any], device_types: Iterable[str]) -> bool:
    """Whether torch has a kernel of its own for this op on one of these devices; no public function answers this."""
    return any(_has_kernel_for_key(op.name(), _dispatch_key_for_device(name)) for name in device_types)


def python_body(op: OpOverload[Any, Any]) -> Callable[..., Any] | None:
    """The function behind `torch.library.custom_op`, if it is one Python function for all devices.

    Torch keeps definitions in a table of its own. Missing: None, and the op is named as one without a formula.
    """
    definition: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {}).get(op_name(op))
    if definition is None or set(getattr(definition, "_backend_fns", ())) != {None}:
        return None
    return cast("Callable[..., Any] | None", getattr(definition, "_init_fn", None))


# One question instead of one per device type on every call of the model. Missing: always True, so that each is asked.
is_any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", lambda: True)

# --- Tensors ----------------------------------------------------------------------------------------------------------

# Every in-place write raises it. It is how a value that was written to since is recognised without copying it.
tensor_version: Callable[[torch.Tensor], int] = attrgetter("_version")
# How many elements a sparse tensor stores; the public `values()` refuses an uncoalesced one.
stored_count: Callable[[torch.Tensor], int] = methodcaller("_nnz")
coo_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
# The sizes of all components of a nested tensor in one call.
nested_sizes: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_nested_tensor_size")
# Hooks on a tensor's gradient; None where there are none.
gradient_hooks: Callable[[torch.Tensor], Mapping[int, Any] | None] = attrgetter("_backward_hooks")

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""The logger that writes a page about an op whose shapes do not fit, before torch raises the error."""


def storage_identity(tensor: torch.Tensor) -> int:
    """The address of the storage's C++ object, which views share and which meta tensors have too, unlike data_ptr()."""
    return int(tensor.untyped_storage()._cdata)


def mark_as_parameter(fake: torch.Tensor) -> None:
    """Make `isinstance(fake, nn.Parameter)` true, as `nn.Parameter()` does, without the op that it runs."""
    fake._is_param = True


# --- Autograd ---------------------------------------------------------------------------------------------------------

# -1 outside of a backward pass: the one sign that tells a backward op from a forward op.
current_graph_task_id: Callable[[], int] = required(
    _C, "_current_graph_task_id", "to tell the forward from the backward pass"
)
# The node whose gradient is computed, by which a backward op is attributed to the module that made the node.
current_autograd_node: Callable[[], Any] = required(
    _C, "_current_autograd_node", "to attribute the backward pass to modules"
)
# The number that the next autograd node of this thread will get.
next_sequence_nr: Callable[[], int] = required(
    _AUTOGRAD, "_get_sequence_nr", "to attribute the backward pass to modules"
)
# The live monitor compares steps by this number too; in a release without it, by their calls alone (None).
recorded_operations: Callable[[], int | None] = getattr(_AUTOGRAD, "_get_sequence_nr", lambda: None)
# The number a node got when its forward op ran.
sequence_nr: Callable[[Any], int] = methodcaller("_sequence_nr")
# The pack and unpack hooks on saved tensors that are on; the argument asks for them during a trace too.
_top_saved_tensors_hooks = required(
    _AUTOGRAD, "_top_saved_tensors_default_hooks", "to see how saved tensors are packed"
)
# What `Tensor.backward` calls. It keeps function modes on, which `Tensor.backward` switches off.
engine_run_backward = required(torch.autograd.graph, "_engine_run_backward", "to run the backward pass")

ENGINE_CODE: CodeType | None = getattr(engine_run_backward, "__code__", None)
"""The frame where a backward pass begins. Missing: a walk up the stack ends at the outermost frame instead."""
APPLY_CODE: CodeType = cast("Any", torch.autograd.Function.apply).__func__.__code__
"""The frame of a custom autograd function's forward pass."""


def saved_tensor_hooks() -> Any:
    """The (pack, unpack) hooks that are on, or None."""
    return _top_saved_tensors_hooks(False)


def is_checkpoint_recomputing() -> bool:
    """Whether `torch.utils.checkpoint` runs a part of the forward pass again.

    It then catches what autograd saves with a class of this name. Missing: False; grad mode and module calls still tell
    recomputation from the backward pass, except where a gradient is taken inside the forward pass.
    """
    hooks = saved_tensor_hooks()
    return bool(hooks) and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def runs_forward_code(code: CodeType) -> bool:
    """Whether this is the code of `nn.Module.__call__` or of checkpointing, which a plain backward op never runs."""
    return code.co_name == "_call_impl" or code.co_filename.endswith("torch/utils/checkpoint.py")


def input_metadata(node: Any) -> Any:
    """Shapes and types of a node's outputs, which outlive the backward pass. Missing: none, so only names compare."""
    return getattr(node, "_input_metadata", ())


# --- Modules ----------------------------------------------------------------------------------------------------------

# The classes of all batch norms and all dropouts; torch has no public common base.
AnyBatchNorm = nn.modules.batchnorm._BatchNorm
AnyDropout = nn.modules.dropout._DropoutNd

# A module's own tables: with names, with Nones, without the children's. The public iterators drop all three.
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
"""What an `nn.Module` keeps in its `__dict__` besides the user's own attributes."""


class LocalBatchNorm(AnyBatchNorm):
    """Batch norm of any number of dimensions that needs no other rank; the base class leaves this check abstract."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        return None


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What `module(...)` does when it is not compiled: hooks and forward."""
    return module._call_impl(*args, **kwargs)


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` has put in the place of the module's call, or None."""
    return getattr(module, COMPILED_CALL, None)


def compiled_original(value: Any) -> nn.Module | None:
    """The module inside of `torch.compile(module)`. Missing: None, and the wrapper is counted as it is."""
    original = getattr(value, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else None


def is_compiled_function(value: Any) -> bool:
    """Whether this is `torch.compile(function)`. Missing: False."""
    return hasattr(value, "_torchdynamo_orig_callable")


def global_hook_tables() -> list[OrderedDict[int, Any]]:
    """The hooks that are registered for all modules. Missing: none."""
    tables = [table for name, table in vars(nn.modules.module).items() if name.startswith("_global_")]
    return [table for table in tables if isinstance(table, OrderedDict) and table]


def class_before_sharding(cls: type[nn.Module]) -> type[nn.Module]:
    """The user's class of a sharded module: `fully_shard` derives a class from (FSDPModule, the user's class)."""
    return cast("type[nn.Module]", cls.__mro__[2])


# --- Attention --------------------------------------------------------------------------------------------------------

# The higher-order op behind `flex_attention`, which torch loads itself. Missing: None, which is equal to no op.
flex_attention_op: Any = getattr(sys.modules.get("torch._higher_order_ops.flex_attention"), "flex_attention", None)
# Which kernel `scaled_dot_product_attention` would take; the number of an `SDPBackend`.
fused_sdp_choice: Callable[..., int] = required(torch, "_fused_sdp_choice", "to know which attention kernel runs")


def mask_over_indices(mask_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A mask function of four indices, mapped over vectors of them as `create_mask` maps it, but for some rows only."""
    from torch.nn.attention import flex_attention

    vmap = required(flex_attention, "_vmap_for_bhqkv", "to count the pairs that a mask function lets through")
    return cast("Callable[..., torch.Tensor]", vmap(mask_mod, prefix=()))


def is_identity_score(score_mod: Any) -> bool:
    """Whether `flex_attention` was called without a `score_mod`. Missing: False, and the count carries a note."""
    return getattr(score_mod, "__name__", "") == "_identity"


def is_flex_device_check(frame: FrameType) -> bool:
    """Whether `flex_attention` is checking that its tensors are where it has a backward pass."""
    is_check = frame.f_code.co_name == "_validate_device"
    return is_check and frame.f_globals["__name__"] == "torch.nn.attention.flex_attention"


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compile_tables() -> tuple[Mapping[Any, Any], Mapping[str, Any]] | None:
    """What `torch.compile` was asked for, and what it has compiled; None while torch's compiler is not loaded.

    Missing: empty, and only what is already compiled is noticed.
    """
    if "torch._dynamo.eval_frame" not in sys.modules or "torch._dynamo.utils" not in sys.modules:
        return None
    asked_for = getattr(sys.modules["torch._dynamo.eval_frame"], "cached_backends", {})
    return asked_for, getattr(sys.modules["torch._dynamo.utils"], "counters", {})


def compile_stance() -> Any:
    """What `torch.compiler.set_stance` has set; there is no public getter. Missing: None."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


# --- Ranks ------------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The key-value store that the training's ranks have met in."""
    from torch.distributed import distributed_c10d

    return required(distributed_c10d, "_get_default_store", "to let ranks find each other")()


def gloo_group(store: Any, rank: int, world_size: int, *, device: Any, timeout: Any) -> Any:
    """A gloo group with its own timeout that joins without waiting for other ranks, unlike the public `new_group`."""
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo
    options = required(gloo, "_Options", "to open a group of its own")()
    options._devices = [device]
    options._timeout = timeout
    return gloo(store, rank, world_size, options)


def fsdp_groups(module: Any) -> Iterable[Any]:
    """The parameter groups of a module that `fully_shard` has sharded. Missing: none, so its ranks are not known."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # earlier releases have one group per module
        single = getattr(state, "_fsdp_param_group", None)
        groups = () if single is None else (single,)
    return cast("Iterable[Any]", groups)
