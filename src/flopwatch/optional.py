"""Load an optional package, or say what to install."""

from importlib import import_module
from types import ModuleType

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
    """Import a package that no extra of ours brings, such as `pandas`, or raise an error that says how to install it.

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
