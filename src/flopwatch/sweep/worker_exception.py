"""What an exception says about how a trial ended. Told by type and by the allocators' own words, never by guessing."""

import traceback
from typing import Any

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.plain_text import cut
from flopwatch.trial_records import Outcome

# RuntimeErrors by which allocators and math libraries say that memory is out (torch 2.13, CUDA 12 and 13).
_DEVICE_WORDS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "HIP out of memory")
_HOST_WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def describe_exception(error: BaseException) -> dict[str, Any]:
    """Its JSON form: type, message, outcome, traceback; `exit_code` for `sys.exit`."""
    content: dict[str, Any] = {
        "type": cut(type(error).__name__, 200),
        "message": cut(message_of(error)),
        "outcome": outcome_of(error),
        "traceback": traceback_of(error),
    }
    if isinstance(error, SystemExit):
        is_number = error.code is None or isinstance(error.code, int)
        content["message"] = cut(f"left by sys.exit({error.code!r})")
        content["exit_code"] = error.code if is_number else content["message"]
    return content


def message_of(error: BaseException) -> str:
    """What it says, whatever that is; an exception's own `__str__` may raise as well."""
    try:
        return str(error)
    except Exception as second:
        return f"its message cannot be read: {type(second).__name__}"


def traceback_of(error: BaseException) -> str:
    """As Python prints it; a message of 50 MB is cut, and its length told."""
    try:
        return "".join(cut(part) for part in traceback.format_exception(error))[-20_000:]
    except Exception as second:
        return f"its traceback cannot be read: {type(second).__name__}"


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a trial that raised this; an out-of-memory may be the cause behind what was raised."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        memory = _memory_outcome(link)
        if memory is not None:
            return memory
        link = link.__cause__ or link.__context__
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "invalid" if isinstance(error, InputError) else "error"


def _memory_outcome(error: BaseException) -> Outcome | None:
    if any(base.__name__ == "OutOfMemoryError" and base.__module__.startswith("torch") for base in type(error).__mro__):
        return "oom_device"
    if isinstance(error, MemoryError):
        return "oom_host"
    if isinstance(error, RuntimeError):
        text = message_of(error)
        if any(words in text for words in _DEVICE_WORDS):
            return "oom_device"
        if any(words in text for words in _HOST_WORDS):
            return "oom_host"
    return None
