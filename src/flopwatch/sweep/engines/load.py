"""Find an engine by name, or as `package.module:Class`."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from flopwatch.errors import InputError
from flopwatch.sweep.engines.protocol import Engine

_HOMES = {
    "local": "flopwatch.sweep.engines.local:LocalEngine",
    "ray": "flopwatch.sweep.engines.ray:RayEngine",
    "slurm": "flopwatch.sweep.engines.slurm:SlurmEngine",
}


def load_engine(name: str, settings: Mapping[str, Any]) -> Engine:
    """An engine with these settings as its arguments.

    >>> load_engine("local", {"jobs": 1}).name
    'local'
    """
    home = _HOMES.get(name, name)
    module, colon, attribute = home.partition(":")
    if not colon:
        raise InputError(f"there is no engine {name!r}; use {', '.join(_HOMES)} or your own as package.module:Class")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the engine {name!r}: {error}") from error
    try:
        return cast("Engine", make(**settings))
    except TypeError as error:
        raise InputError(f"the engine {name!r} does not take {dict(settings)}: {error}") from None
