"""The lines in which an output is kept, so that a difference names a cell, a sentence or a number.

A text keeps its lines, JSON becomes one line per value, and a page the set of its texts with its size: its markup may
change as long as nothing that a reader sees is lost. Of the outputs of a large sweep only a digest per section is kept.
"""

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from typing import Any

Sections = Iterator[tuple[str, list[str]]]

_INLINE = {"a", "abbr", "b", "br", "code", "em", "i", "kbd", "small", "strong", "sub", "sup", "tspan", "wbr"}
_WITHOUT_END = {"br", "hr", "img", "input", "link", "meta", "wbr"}
_SAID_BY_ATTRIBUTES = ("title", "aria-label", "data-tip", "alt", "placeholder")
_HEADINGS = {"h1", "h2"}
_DIGITS = 12


def kept(form: str, text: str) -> list[str]:
    """The lines of an output in one of the forms text, json or html."""
    if form == "json":
        return json_lines(text)
    if form == "html":
        page = _Page(text)
        said = {line for _, lines in page.sections for line in lines}
        return [f"size {len(text.encode())}", *sorted(said)]
    return [line.rstrip() for line in text.splitlines()]


def digests(form: str, text: str) -> list[str]:
    """A line per section of an output: its name, how much there is, and a hash."""
    divide = {"json": _json_sections, "html": _page_sections, "csv": _csv_sections}.get(form, _text_sections)
    lines = [f"size {len(text.encode())}"]
    for title, content in divide(text):
        joined = "\n".join(content)
        digest = hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        lines.append(f"{title}: {len(content)} lines, {len(joined)} characters, {digest}")
    return lines


def json_lines(text: str) -> list[str]:
    """One line per value, in the order of the keys' names; text that is no JSON stays as it is."""
    try:
        return sorted(leaves(json.loads(text)))
    except ValueError:
        return text.splitlines()


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield f"{path} = {json.dumps(_rounded(value), ensure_ascii=False, sort_keys=True)}"


def _rounded(value: Any) -> Any:
    """The last digits of a float depend on the order of a sum."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


class _Page(HTMLParser):
    """The texts of a page by its headings. Scripts and styles say nothing; what looks like a sentence stays whole."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[tuple[str, list[str]]] = [("page", [])]
        self._open: list[str] = []
        self._said = ""
        self._heading: str | None = None
        self.feed(text)
        self.close()
        self._flush()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _INLINE:
            self._flush()
        if tag in _HEADINGS:
            self._heading = tag
        self.sections[-1][1].extend(f"{name}: {value}" for name, value in attrs if name in _SAID_BY_ATTRIBUTES)
        if tag not in _WITHOUT_END:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _INLINE:
            self._flush()
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self._said += data

    def _flush(self) -> None:
        said, self._said = " ".join(self._said.split()), ""
        if said and self._heading:
            self.sections.append((said, []))
        if said:
            self.sections[-1][1].append(said)
            self._heading = None


def _page_sections(text: str) -> Sections:
    for title, lines in _Page(text).sections:
        yield title, sorted(set(lines))


def _json_sections(text: str) -> Sections:
    value = json.loads(text)
    for name, item in value.items() if isinstance(value, dict) else [("all", value)]:
        yield str(name), sorted(leaves(item))


def _csv_sections(text: str) -> Sections:
    rows = list(csv.reader(io.StringIO(text)))
    for name, *column in zip(*rows, strict=True):
        yield name, column


def _text_sections(text: str) -> Sections:
    """Markdown is divided at its headings, other text where two lines are empty between paragraphs or one is."""
    parts = re.split(r"\n(?=## )" if text.startswith("#") or "\n## " in text else r"\n\n", text)
    for part in parts:
        lines = [line.rstrip() for line in part.strip("\n").splitlines()]
        if lines:
            yield " ".join(lines[0].split())[:60], lines


def numbers_in(lines: Iterable[str]) -> Iterator[str]:
    """Without their signs, which have several spellings; digits in a name are no number."""
    for line in lines:
        yield from (found.rstrip(".,") for found in re.findall(r"(?<![\w.])\d[\d.,]*(?!\w)", line))


def words_in(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from re.findall(r"[\w.,%×+−-]*\w[\w%]*", line)


def words_lost_and_new(before: Iterable[str], after: Iterable[str]) -> tuple[list[str], list[str]]:
    """Words that occur less or more often than before, whatever the lines are."""
    was, now = Counter(words_in(before)), Counter(words_in(after))
    return list((was - now).elements()), list((now - was).elements())
