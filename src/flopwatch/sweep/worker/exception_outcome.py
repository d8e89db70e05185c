"""What an exception says about how a trial ended. Told by its type; by words only where compiled code raised it."""

import dis
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.records.reading import cut
from flopwatch.records.trial import Outcome

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
        content["message"] = cut(f"left by sys.exit({_repr(error.code)})")
        content["exit_code"] = error.code if is_number else content["message"]
    return content


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # the value's own __repr__ may raise anything
        return f"<{type(value).__name__}>"


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of its message, cut; its type where there is no message."""
    return cut((message_of(error).strip() or type(error).__name__).splitlines()[0], most)


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
    memory = next((outcome for link in _chain(error) if (outcome := _memory_outcome(link)) is not None), None)
    if memory is not None:
        return memory
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "invalid" if isinstance(error, InputError) else "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It and what led to it, as Python prints them: `raise ... from None` says that what came before is settled."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += _members(link)
        before = link.__cause__ if link.__suppress_context__ else link.__cause__ or link.__context__
        if before is not None:
            waiting.append(before)


def _members(error: BaseException) -> list[BaseException]:
    """The exceptions of an exception group. By its attribute, because Python 3.10 has no class for it; a user's own
    exception may have an attribute of that name with anything in it.
    """
    try:
        members = list(getattr(error, "exceptions", ()))
    except Exception:
        return []
    return [member for member in members if isinstance(member, BaseException)]


def _memory_outcome(error: BaseException) -> Outcome | None:
    if isinstance(error, MemoryError):
        return "oom_host"
    out_of_memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if out_of_memory is not None and isinstance(error, out_of_memory):
        return "oom_device"
    if isinstance(error, RuntimeError) and _is_native(error):
        text = message_of(error)
        if any(words in text for words in _DEVICE_WORDS):
            return "oom_device"
        if any(words in text for words in _HOST_WORDS):
            return "oom_host"
    return None


def _is_native(error: BaseException) -> bool:
    """Whether compiled code raised it: torch's CPU allocator and cuBLAS have no type of their own for want of memory.
    What a `raise` in Python says is anybody's words.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_lasti < 0:
        return False
    return not dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]].startswith(("RAISE", "RERAISE"))
