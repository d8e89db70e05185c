"""Modules that are loaded only when they are needed: optional packages, and the homes of public names."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from flopwatch.errors import MissingDependencyError


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise an error that names the extra to install.

    >>> require("json", "hf").__name__
    'json'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"this needs the package {package!r}, which could not be imported ({error}); "
            f'install it with: pip install "flopwatch[{extra}]"'
        ) from error


def require_package(package: str, purpose: str, instead: str = "") -> ModuleType:
    """Import a package that none of our extras installs, such as `pandas`, or raise an error that names it.

    >>> require_package("json", "this").__name__
    'json'
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {package!r}, which could not be imported ({error}); "
            f"install it with: pip install {package}{instead}"
        ) from error


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names are imported from their home modules on first use.

    Importing a package must not load torch: supervisors and half of the commands do without it.

    Args:
        package: The package's name, for the error message.
        homes: Public name to the module that defines it; a name that is the last part of its home is that module.

    Example:
        >>> lazy_exports("flopwatch", {"sqrt": "math"})("sqrt")(9.0)
        3.0
    """

    def getattr_of_package(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        return home if homes[name] == f"{package}.{name}" else getattr(home, name)

    return getattr_of_package
