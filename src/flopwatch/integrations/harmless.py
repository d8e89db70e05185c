"""A training must survive whatever goes wrong in a callback of ours."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger("flopwatch")

Method = TypeVar("Method", bound=Callable[..., Any])


def harmless(method: Method) -> Method:
    """A method whose errors are reported once per object and swallowed, unless the object's `strict` is true.

    >>> class Callback:
    ...     strict = False
    ...     @harmless
    ...     def on_step_end(self):
    ...         return 1 / 0
    >>> Callback().on_step_end() is None
    True
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if getattr(self, "strict", False):
                raise
            _report_once(self, method.__name__, error)
            return None

    return guarded  # type: ignore[return-value]


def _report_once(owner: Any, part: str, error: Exception) -> None:
    reported = vars(owner).setdefault("_reported_parts", set())
    if part not in reported:
        reported.add(part)
        _log.error("flopwatch: %s failed, training goes on: %s: %s", part, type(error).__name__, error)
        _log.debug("flopwatch: where %s failed", part, exc_info=error)
