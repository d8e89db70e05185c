"""Finds English sentences in a text that should be Chinese."""

import re
from html import unescape
from typing import Any

_NAMES = {"flopwatch", "RUN", "UTC", "world", "size", "rank", "loss", "token", "tokens", "trace", "kernel", "smart"}


def english_left(shown: str, known: set[str]) -> list[str]:
    """Words of sentences that are neither names, code, values nor what the log itself says."""
    text = unescape(re.sub(r"<[^>]*>", " | ", re.sub(r"(?s)<(style|script|code).*?</\1>", " ", shown)))
    text = " ".join(re.sub(r"\\([_*`<>#|~$\[\]{}()])", r"\1", text).split())
    for value in sorted((" ".join(value.split()) for value in known), key=len, reverse=True):
        text = text.replace(value, " | ") if len(value) > 3 else text
    text = re.sub(r"`[^`]*`|flopwatch \w+ \S+|--\S+|\S*[_./=(){}\[\]@\d:]\S*", " | ", text)
    found = re.findall(r"[A-Za-z][a-z'-]+(?:[ ,]+[A-Za-z][a-z'-]+)+", text)
    return [words for words in found if not set(re.findall(r"[A-Za-z'-]+", words)) <= _NAMES | known]


def texts_of(content: Any) -> set[str]:
    """All texts of a JSON value, which the page of a run may show as they are."""
    if isinstance(content, str):
        return {content, *content.rstrip(".").split("; "), *content.split("`")}
    parts = [*content, *content.values()] if isinstance(content, dict) else content if isinstance(content, list) else []
    return {value for part in parts for value in texts_of(part)}
