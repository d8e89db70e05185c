"""Sees the Triton kernels that a training launches itself, which no op of torch shows.

Only while a step is counted, Triton's own method for launches is wrapped. Inside of compiled code, torch writes such
launches into its graphs instead. Neither was run on a GPU so far.
"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from flopwatch.flops.formulas.registry import kernel_formulas
from flopwatch.torch_internals.autograd import frames_from

PREFIX = "triton::"
OnLaunch = Callable[[Any, Mapping[str, Any]], None]

_LAUNCHER, _TUNER = "triton.runtime.jit", "triton.runtime.autotuner"
_WITHOUT_PRODUCTS = "liger_kernel."
"""Liger computes products by torch's ops. Its kernels (norms, activations, losses, rotary embeddings) have none, except
those whose source calls `dot` (neighborhood attention, experts); so in all 91 kernels of Liger 0.8.5."""


def name_of(kernel: Any) -> str:
    """The name of a kernel's function, also where Triton has wrapped it to choose its parameters."""
    return PREFIX + str(getattr(_unwrapped(kernel)[1], "__name__", "kernel"))


def flops_of(kernel: Any, arguments: Mapping[str, Any]) -> int | None:
    formula = kernel_formulas.get(name_of(kernel))
    if formula is not None:
        return formula(**arguments)
    jit, function = _unwrapped(kernel)
    is_known = str(getattr(function, "__module__", "")).startswith(_WITHOUT_PRODUCTS)
    return 0 if is_known and "dot" not in getattr(jit, "src", "dot(") else None


def watch_launches(on_launch: OnLaunch) -> Callable[[], bool]:
    """Call `on_launch` before each launch, until the function is called that is returned.

    It returns False if Triton was imported in the meantime, so that launches may have been missed.
    """
    owner: Any = getattr(sys.modules.get(_LAUNCHER), "JITFunction", None)
    launch = None if owner is None else vars(owner).get("run")
    if launch is None:
        return lambda: _LAUNCHER not in sys.modules or owner is not None
    is_on = [True]

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_on and not kwargs.get("warmup") and not _is_tuning(sys._getframe(1)):
            names = list(getattr(self, "arg_names", ()))
            on_launch(self, {**dict(zip(names, args, strict=False)), **{n: kwargs[n] for n in names if n in kwargs}})
        return launch(self, *args, **kwargs)

    def stop() -> bool:
        is_on.clear()
        if vars(owner).get("run") is run:  # otherwise another tool has wrapped it too
            owner.run = launch
        return True

    owner.run = run
    return stop


def _is_tuning(frame: FrameType) -> bool:
    tuner = getattr(sys.modules.get(_TUNER), "__file__", None)
    codes = (each.f_code for each in frames_from(frame))
    return any(code.co_name == "_bench" and code.co_filename == tuner for code in codes)


def _unwrapped(kernel: Any) -> tuple[Any, Any]:
    while hasattr(getattr(kernel, "fn", None), "fn"):
        kernel = kernel.fn
    return kernel, getattr(kernel, "fn", None)
