"""Text from outside, made harmless to show and to keep: messages, names, log lines. Standard library only.

Whatever a trial, a scheduler or a file said passes through here before it reaches a person. What is shown goes to
rich as `Text`, never as markup.
"""

import re
from collections.abc import Sequence

_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# C0 and C1 but tab and newline, direction marks (they reorder what stands beside them), line separators, what has no
# width (but the joiners that emoji need), surrogates.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2064\u2066-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    r"""What a person would see, with what cannot be seen spelled out.

    >>> plain("\x1b[31mred\x1b[0m, 10 %\r20 %\x07, \u202eevil")
    '20 %\\x07, \\u202eevil'
    """
    text = _ESCAPE_SEQUENCES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:  # a progress bar drew over itself: the last state is what one would see
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _HARMFUL.sub(_spelled_out, text)


def one_line(text: str, most: int | None = None) -> str:
    """As `plain`, on one line; cut to so many characters where a place has no room for more."""
    # Cut before and after: 50 MB need not be read to show 300, and what is spelled out grows.
    line = " ".join(plain(text if most is None else text[: 4 * most]).split())
    return line if most is None or (len(line) <= most and len(text) <= 4 * most) else f"{line[:most].rstrip()}…"


def first_line(said: object, most: int | None = None) -> str:
    r"""The first line of a message, cut to so many characters; of an exception without one, the name of its class.

    >>> first_line(ValueError("no such axis\n  File ...")), first_line(KeyError()), first_line("")
    ('no such axis', 'KeyError', '')
    """
    nothing = type(said).__name__ if isinstance(said, BaseException) else ""
    return (str(said).strip().splitlines() or [nothing])[0][:most]


def cut(text: str, most: int = 4000) -> str:
    """Of a text that is too long its beginning and its end, and how long it was.

    >>> cut("a" * 50, 20)
    'aaaaaaaaaa … (50 characters in all, cut to 20) … aaaaaaaaaa'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text):,} characters in all, cut to {2 * half:,}) … {text[-half:]}"


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2), listed(["a", "b"])
    ('a, b and 1 more', 'a, b')
    """
    more = f" and {len(names) - at_most:,} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def _spelled_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
