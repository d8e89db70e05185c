"""Imports modules when they are first needed: optional packages, and modules that define public names.

Standard library only.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from flopwatch.errors import MissingDependencyError
from flopwatch.random_state import same_random_states


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
