"""Makes texts from files and trials safe to show, and shortens texts. Standard library only.

Messages, names and log lines from trials, schedulers and files pass through these functions before they are shown or
stored. They are printed with rich as `Text`, never as markup, because they may contain square brackets.
"""

import re
from collections.abc import Iterator, Sequence

from flopwatch.language import Said, commas

_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# Characters that are escaped: C0 and C1 control codes except tab and newline, direction marks (they reorder the text
# around them), line separators, zero-width characters except the joiners that emoji need, and surrogates.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2064\u2066-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    r"""The text as a terminal would show it, with invisible characters escaped.

    >>> plain("\x1b[31mred\x1b[0m, 10 %\r20 %\x07, \u202eevil")
    '20 %\\x07, \\u202eevil'
    """
    text = _ESCAPE_SEQUENCES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:  # a progress bar overwrites its line, so only the last state is kept
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _HARMFUL.sub(_spelled_out, text)


def one_line(text: str, most: int | None = None) -> str:
    """The result of `plain` on one line, cut to `most` characters."""
    # Cut before escaping, because a text may be 50 MB long, and again after it, because escaping adds characters.
    line = " ".join(plain(text if most is None else text[: 4 * most]).split())
    return line if most is None or (len(line) <= most and len(text) <= 4 * most) else f"{line[:most].rstrip()}…"


def first_line(said: object, most: int | None = None) -> str:
    r"""The first line of a text or an exception's message, cut to `most` characters.

    If an exception has no message, the result is the name of its class.

    >>> first_line(ValueError("no such axis\n  File ...")), first_line(KeyError()), first_line("")
    ('no such axis', 'KeyError', '')
    """
    nothing = type(said).__name__ if isinstance(said, BaseException) else ""
    try:
        text = str(said)
    except Exception:  # noqa: BLE001 - the __str__ of a user's exception may raise
        text = ""
    return (text.strip().splitlines() or [nothing])[0][:most]


def cut(text: str, most: int = 4000) -> str:
    """The text; if it has more than `most` characters, its beginning and end with a note in between.

    >>> cut("a" * 50, 20)
    'aaaaaaaaaa … (50 characters in all, cut to 20) … aaaaaaaaaa'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text):,} characters in all, cut to {2 * half:,}) … {text[-half:]}"


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, separated by commas, and how many more there are.

    >>> listed(["a", "b", "c"], 2), listed(["a", "b"])
    ('a, b and 1 more', 'a, b')
    """
    first = commas(names[:at_most])
    more = len(names) - at_most
    return Said("{names} and {more:,} more", names=first, more=more) if more > 0 else first


def cells(text: str) -> int:
    """How many columns of a terminal the text takes: Chinese characters take two.

    >>> cells("12 ms"), cells("单步时间")
    (5, 8)
    """
    if text.isascii():
        return len(text)
    import unicodedata  # loads a library, which few texts need

    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def padded(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


_WIDE = r"\u2e80-\u9fff\uac00-\ud7ff\uff00-\uffef“”"
_NOT_FIRST = r"[，。：；、！？）”》%]*"
_PIECES = rf"[{_WIDE}]{_NOT_FIRST}|[^{_WIDE}]+{_NOT_FIRST}"
"""A wide character, or a word; with the punctuation that must not begin a line."""


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a paragraph. Words are not broken; between wide characters, a line may end.

    >>> wrapped("as wide as this", 8), wrapped("每行最多 8 格。", 8)
    (['as wide', 'as this'], ['每行最多', '8 格。'])
    """
    lines = [""]
    for piece in _pieces(text):
        if cells((lines[-1] + piece).rstrip()) > width and lines[-1].strip():
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return [line.rstrip() for line in lines if line.strip()]


def _pieces(text: str) -> Iterator[str]:
    """What must not be broken, and the spaces between."""
    for word in re.split(r"(\s+)", text):
        if max(word, default="") < "\u2e80":  # the pattern takes long to compile, and English does not need it
            yield word
        else:
            yield from re.findall(_PIECES, word)


def plural(amount: int, word: str) -> str:
    """A number and a noun in the singular or plural.

    >>> plural(1, "trial"), plural(3000, "trial")
    ('1 trial', '3,000 trials')
    """
    return f"{amount:,} {word}" if amount == 1 else f"{amount:,} {word}s"


def _spelled_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
