"""Imports modules when they are first needed: optional packages, and modules that define public names.

What flopwatch does in a training leaves its random numbers as they are. Standard library only.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from flopwatch.errors import MissingDependencyError


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise an error that names the extra of flopwatch to install.

    >>> require("json", "hf").__name__
    'json'
    """
    return _imported(module, module.partition(".")[0], "this feature", f'"flopwatch[{extra}]"')


def require_package(package: str, purpose: str, instead: str = "") -> ModuleType:
    """Import a package that no extra of flopwatch installs, such as `pandas`, or raise an error that names it.

    >>> require_package("json", "this").__name__
    'json'
    """
    return _imported(package, package, purpose, package + instead)


def _imported(module: str, package: str, purpose: str, pip_arguments: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {package!r}, which cannot be imported ({error}); "
            f"install it with: pip install {pip_arguments}"
        ) from error


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports each public name on first use.

    Importing a package must not load torch, because many commands and the supervisors of trials run without it. `homes`
    has the module of each name. A sub-module is its own home: `{"sweep": "flopwatch.sweep"}`.

    >>> lazy_exports("flopwatch", {"sqrt": "math"})("sqrt")(9.0)
    3.0
    """

    def getattr_of_package(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with same_random_states():
            home = import_module(homes[name])
        return home if homes[name] == f"{package}.{name}" else getattr(home, name)

    return getattr_of_package


@contextmanager
def same_random_states() -> Iterator[None]:
    """When the block ends, restore the default generators of Python, NumPy and torch, as far as they are loaded.

    Even an import can draw: `rich` numbers its styles from a random start. Never use this in a thread of flopwatch,
    because what the training draws meanwhile would be drawn again.

    >>> random.seed(0)
    >>> with same_random_states():
    ...     first = random.random()
    >>> random.random() == first
    True
    """
    states = list(_states())
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)


def _states() -> Iterator[tuple[Callable[[Any], object], Any]]:
    yield random.setstate, random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):
        yield numpy.set_state, numpy.get_state(legacy=False)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_rng_state"):  # not while torch is being imported
        yield torch.set_rng_state, torch.get_rng_state()
        # Only of the current device, because reading the state of another one could create a context on it.
        for device in (torch.cuda, torch.xpu):
            if device.is_initialized():
                yield device.set_rng_state, device.get_rng_state()
