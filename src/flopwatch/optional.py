"""Load an optional package, or say which extra brings it."""

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
