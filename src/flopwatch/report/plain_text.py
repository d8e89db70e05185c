"""Text of others, made harmless to show: no escape sequences, no control or direction marks, no half characters."""

import re

_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# C0 and C1 but tab and newline, direction marks (they reorder what stands beside them), line separators, surrogates.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060\u2066-\u2069\ufeff"
    "\ud800-\udfff\ufffe\uffff]"
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


def one_line(text: str) -> str:
    return " ".join(plain(text).split())


def _spelled_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
