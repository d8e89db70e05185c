"""Private names of torch's autograd engine and compiler, with their checks."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from operator import methodcaller
from types import CodeType, FrameType
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn

from flopwatch.guard import Guard
from flopwatch.torch_internals import CHECKS, apart, declare

# --- Autograd ---------------------------------------------------------------------------------------------------------

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_MODULE_CALL: CodeType = cast("Any", nn.Module.__call__).__code__


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the outermost last."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def engine_code() -> CodeType | None:
    """Code object of torch's Python function that starts a backward pass, found by running one; None if there is none.

    Searches of the stack for forward code stop at the frame of this function.
    """
    found: list[CodeType] = []

    def look(_: Any) -> None:
        codes = (frame.f_code for frame in frames_from(sys._getframe(1)))
        found.extend(code for code in codes if code.co_filename == torch.autograd.graph.__file__)

    def run() -> None:
        product = torch.ones(1, requires_grad=True) * 2
        product.register_hook(look)
        torch.autograd.backward(product, torch.ones(1))  # not `Tensor.backward`, which trainings replace

    with Guard("the search for the frame of a backward pass"):
        apart(run)
    return found[0] if found else None


_TASK = declare("torch._C._current_graph_task_id")
_NODE = declare("torch._C._current_autograd_node")
_NEXT = declare("torch._C._autograd._get_sequence_nr")
_SEQUENCE = declare("torch.autograd.graph.Node._sequence_nr")

current_graph_task_id: Callable[[], int] = getattr(torch._C, _TASK, lambda: -1)
"""A number that identifies the running backward pass; -1 outside of one."""
current_autograd_node: Callable[[], Any] = getattr(torch._C, _NODE, lambda: None)
"""The autograd node that is running; None outside of a backward pass."""
recorded_operations: Callable[[], int | None] = getattr(cast("Any", torch._C)._autograd, _NEXT, lambda: None)
"""The number of autograd nodes that this thread has made, which is the number of the next one; None if unknown."""
sequence_nr: Callable[[Any], int] = methodcaller(_SEQUENCE)
"""The number that an autograd node got when its forward op ran."""


def _probe_nodes() -> bool:
    """Whether two small backward passes have numbers of their own, and each shows its node, which has its number."""
    tasks: list[int] = []
    for _ in range(2):
        number = recorded_operations()
        product = torch.ones(1, requires_grad=True) * 2
        running: list[Any] = []
        product.register_hook(lambda _, seen=running: seen.extend((current_autograd_node(), current_graph_task_id())))
        torch.autograd.backward(product, torch.ones(1))  # not `Tensor.backward`, which trainings replace
        tasks.append(running[1])
        if running[0] != product.grad_fn or sequence_nr(product.grad_fn) != number:
            return False
    outside = current_graph_task_id(), current_autograd_node()
    return outside == (-1, None) and len(set(tasks)) == 2 and min(tasks) >= 0


CHECKS[_TASK, _NODE, _NEXT, _SEQUENCE] = _probe_nodes

_ENGINE = declare("torch.autograd.Variable._execution_engine")


def at_end_of_backward(callback: Callable[[], object]) -> bool:
    """Let a function be called when the running backward pass has ended; False if that is not possible."""
    queue = getattr(getattr(torch.autograd.Variable, _ENGINE, None), "queue_callback", None)
    if queue is not None:
        queue(callback)
    return queue is not None


def saves_through_hooks() -> bool:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


_AOT = declare("torch._functorch._aot_autograd")


def runs_compiled_backward() -> bool:
    """Whether compiled code runs its backward pass: a hook of the training on its node has the same running node."""
    return _runs_in_engine(lambda code: _AOT in code.co_filename)


def runs_forward_again() -> bool:
    """Whether a module or checkpointing runs inside a backward pass, which happens only in recomputation."""
    return _runs_in_engine(runs_forward_code)


def _runs_in_engine(is_sought: Callable[[CodeType], bool]) -> bool:
    engine = engine_code()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not engine:
        if is_sought(frame.f_code):
            return True
        frame = frame.f_back
    return False


def runs_forward_code(code: CodeType) -> bool:
    """Whether `code` belongs to `nn.Module.__call__` or to checkpointing, which run only in a forward pass."""
    return code is _MODULE_CALL or code.co_filename == _CHECKPOINT_FILE


# --- torch.compile ----------------------------------------------------------------------------------------------------

_EVAL_FRAME = declare("torch._dynamo.eval_frame")
"""The module in which the class and the functions are defined that `torch.compile` returns."""
_BACKENDS = declare("torch._dynamo.eval_frame.cached_backends")
_OUTPUT_GRAPH = declare("torch._dynamo.output_graph.OutputGraph.call_user_compiler")
_COUNTERS = declare("torch._dynamo.utils.counters")
_SPENT = declare("torch._dynamo.utils.calculate_time_spent")
_KERNELS = declare("torch._higher_order_ops.triton_kernel_wrap.kernel_side_table")


def graph_kernel(kernel: int, constants: int) -> tuple[Any, Mapping[str, Any]]:
    table = getattr(sys.modules["torch._higher_order_ops.triton_kernel_wrap"], _KERNELS)
    return table.get_kernel(kernel), table.get_constant_args(constants)


def compiled_graphs() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), _COUNTERS, {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def compile_seconds() -> float:
    """How long `torch.compile` has compiled in this process so far, forward and backward passes."""
    spent = getattr(sys.modules.get("torch._dynamo.utils"), _SPENT, None)
    return 0.0 if spent is None else float(spent()["total_wall_time"])


def wrap_backend_calls(compile_with: Callable[[Any, Callable[[], Any]], Any]) -> Callable[[], None] | None:
    """Let `compile_with` compile each graph from now on; it gets the graph and the function that compiles it.

    Returns what puts torch's own method back; None if calls of compiled code could not be counted.
    """
    owner: Any = getattr(sys.modules.get("torch._dynamo.output_graph"), "OutputGraph", None)
    original = getattr(owner, _OUTPUT_GRAPH, None)
    if original is None or find_spec(f"torch._functorch.{_AOT}") is None:
        return None

    def call_user_compiler(self: Any, module: Any, *rest: Any) -> Any:  # torch 2.6 passes the graph alone
        return compile_with(module, lambda: original(self, module, *rest))

    def put_back() -> None:
        if owner.call_user_compiler is call_user_compiler:  # and nobody else has wrapped it since
            owner.call_user_compiler = original

    owner.call_user_compiler = call_user_compiler
    return put_back


_COMPILER = f"torch._dynamo.{_EVAL_FRAME}"


def compiled_original(value: Any) -> nn.Module | None:
    """The module inside `torch.compile(module)`, which is the only child of the wrapper; None for another value."""
    if not isinstance(value, nn.Module) or type(value).__module__ != _COMPILER:
        return None
    children = list(nn.Module.children(value))
    return children[0] if len(children) == 1 else None


def is_compiled_function(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(_COMPILER), "__file__", None)


def requested_compilations() -> Mapping[Any, Any] | None:
    compiler = sys.modules.get(_COMPILER)
    if compiler is None:
        return None
    table = getattr(compiler, _BACKENDS, None)
    return table if isinstance(table, dict) else {None: "unknown"}
