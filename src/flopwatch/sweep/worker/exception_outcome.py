"""Finds the outcome of a trial from its exception: by its type, or by the message of a RuntimeError."""

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.files import is_full_disk
from flopwatch.records.trial import Outcome
from flopwatch.text import cut

_Result = TypeVar("_Result")

# Messages of the RuntimeErrors by which allocators and math libraries report out of memory (torch 2.13, CUDA 12, 13).
_MEMORY_WORDS: dict[str, Outcome] = {
    "CUDA out of memory": "oom_device",
    "CUDA error: out of memory": "oom_device",
    "CUBLAS_STATUS_ALLOC_FAILED": "oom_device",
    "HIP out of memory": "oom_device",
    "DefaultCPUAllocator: can't allocate memory": "oom_host",
    "DefaultCPUAllocator: not enough memory": "oom_host",
}


def describe_exception(error: BaseException) -> dict[str, Any]:
    """The content of `exception.json`: type, message, outcome and traceback; for `sys.exit` also `exit_code`."""
    content: dict[str, Any] = {
        "type": cut(type(error).__name__, 200),
        "message": cut(message_of(error)),
        "outcome": outcome_of(error),
        "traceback": traceback_of(error),
    }
    if isinstance(error, SystemExit):
        code = error.code
        content["message"] = cut(_read(lambda: f"the trial called sys.exit({code!r})"))
        content["exit_code"] = code if code is None or isinstance(code, int) else content["message"]
    return content


def message_of(error: BaseException) -> str:
    return _read(lambda: str(error))


def traceback_of(error: BaseException) -> str:
    return _read(lambda: "".join(map(cut, traceback.format_exception(error)))[-20_000:])


def _read(read: Callable[[], str]) -> str:
    text, second = result_or_error(read)
    return text if text is not None else f"the exception cannot be read, which raises {type(second).__name__}"


def result_or_error(action: Callable[[], _Result]) -> tuple[_Result | None, Exception | None]:
    """What the action returns, or what it raises: a user's trainer, model, exception or stream may raise anything."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - see above
        return None, error


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a trial that raised this exception; it or one of its causes may report memory or a full disk."""
    for link in _chain(error):
        if (outcome := _memory_outcome(link)) is not None:
            return outcome
    if any(map(is_full_disk, _chain(error))):
        return "lost"  # it says nothing about the configuration, so the trial is retried
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "invalid" if isinstance(error, InputError) else "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes, as in a traceback: those before a `raise ... from None` are left out."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        # Python 3.10 has no exception groups, but the package `exceptiongroup`, whose classes have the same name.
        if any(base.__name__ == "BaseExceptionGroup" for base in type(link).__mro__):
            waiting += getattr(link, "exceptions", ())
        before = link.__cause__ if link.__suppress_context__ else link.__cause__ or link.__context__
        if before is not None:
            waiting.append(before)


def _memory_outcome(error: BaseException) -> Outcome | None:
    if isinstance(error, MemoryError):
        return "oom_host"
    out_of_memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if out_of_memory is not None and isinstance(error, out_of_memory):
        return "oom_device"
    if isinstance(error, RuntimeError):
        text = message_of(error)
        return next((outcome for words, outcome in _MEMORY_WORDS.items() if words in text), None)
    return None
