"""Builds models from a name, a configuration file or a function, and dummy batches for them."""

from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports

if TYPE_CHECKING:
    from flopwatch.models.load import dummy_batch, load_model

__all__ = ["dummy_batch", "load_model"]

__getattr__ = lazy_exports("flopwatch.models", dict.fromkeys(__all__, "flopwatch.models.load"))
