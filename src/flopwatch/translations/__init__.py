"""Finds the Chinese of an English text. Standard library only.

The table, `zh.json`, has English sentences with the values as {0}, {1}, and their translations:

- `texts` are all sentences of the source. `tests/test_chinese.py` fails if one is missing. Null: no person is shown it.
- `words` are words, and sentences that the source joins from pieces.
- `headings` are words that are found only where they are all that is shown. Within a sentence they may be names.

A sentence is found by its fixed words. What stands in the holes is translated the same way. A text that is no sentence
of the table is tried by its sentences and their parts. Of all readings, the one that leaves the fewest English words
wins; what the table does not have stays as it is.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_name("zh.json")


def translated(text: str) -> str:
    """The text in Chinese.

    >>> translated("12 trials")
    '12 个 trial'
    """
    if not _WORD.search(text):
        return text
    said = _translation(text).text
    return said if said == text else _ENGLISH_SPACE.sub("", said)


_WORD = re.compile(r"[A-Za-z]{2}")
_ENGLISH_WORD = re.compile(r"(?<![\w/.`$<-])[A-Za-z]?[a-z]{2,}(?:-[a-z]+)*(?![\w/`=>-])")
"""A word of a sentence, not a part of a path, a flag or a name. How many are left is the measure of a translation."""
_ENGLISH_SPACE = re.compile(r" +(?=[，。；：、（）])|(?<=[，。；：、）]) +(?=[\u4e00-\u9fff])")
"""A space that a piece of a sentence had in English, beside a Chinese comma or bracket."""
_HOLE = re.compile(r"\{(\d+)\}")
_ENDS = {".": "。", ":": "：", ";": "；", "?": "？"}
_BETWEEN_SENTENCES = (("\n", "\n"), (". ", "。"))
_WITHIN_SENTENCES = (("; ", "；"), (": ", "："), (", ", "，"))
_IN_BRACKETS = re.compile(r"(.*?) \((.*)\)(.*)", re.DOTALL)
_LABELLED = re.compile(r"([^.:;]{1,40}): (.+)", re.DOTALL)
_LABEL = re.compile(r"[a-z][A-Za-z -]+: ")
_MOST_LETTERS = 4000
_SEEN = {"; ": 1, ", ": 1, ": ": _MOST_LETTERS}
"""How many letters decide whether a joint at the beginning becomes Chinese."""
_JOINTS = re.compile("; |: |, |[；：，]")
_AMOUNT = r"[~≥≈±-]?\d\S* (?:[KMGTP]iB|B|ms|s|min|h|d|%|[kMGTPEZ]?FLOP(?:/s)?)"
_ONE_VALUE = rf"({_AMOUNT}(?: {_AMOUNT})?|\S*[^\s:;,])"
_COUNTED = re.compile(r"\{0\} [个条行步次对种台块]")
_HAN = re.compile("[\u4e00-\u9fff]")
_DEEPEST = 8
_SHORT = 16


class _Translation(NamedTuple):
    """`left` is how many English words it still has."""

    left: int
    text: str


class _Sentence:
    """An English sentence with holes, and its translation."""

    def __init__(self, english: str, translation: str) -> None:
        parts = _HOLE.split(english)
        self._literals, self._order = parts[::2], [int(number) for number in parts[1::2]]
        self._anchor = max(self._literals, key=len)
        self.has_beginning = bool(self._literals[0])
        self.size = sum(map(len, self._literals))
        self.translation = translation

    def values(self, text: str) -> Mapping[int, str] | None:
        """What stands in the holes, if the text is this sentence. No hole ends within brackets."""
        if self._anchor not in text:
            return None
        match = self._pattern.fullmatch(text)
        if match is None or (_is_closed(text) and not all(map(_is_closed, match.groups()))):
            return None
        if not self._literals[0] and ": " in match[1]:
            return None
        return dict(zip(self._order, match.groups(), strict=True))

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        """In a short sentence, a hole is a word or an amount; in `{0} trials`, a number; in `next: {0}`, all.

        Of adjacent holes, the first takes all.
        """
        hole = _ONE_VALUE if self.size < _SHORT else "(.*?)"
        first, *others = self._literals
        is_counted = _COUNTED.match(self.translation) or others[0].strip().isalpha()
        if not first and ((len(others) == 1 and is_counted) or others == [" of ", ""]):
            hole = r"(\d\S*)"
        if _LABEL.fullmatch(first) and others == [""]:
            hole = "(.*)"
        pattern = re.escape(first)
        for place, literal in enumerate(others):
            pattern += ("()" if place and not self._literals[place] else hole) + re.escape(literal)
        return re.compile(pattern, re.DOTALL)


def _is_closed(text: str) -> bool:
    return text.count("(") == text.count(")")


class _Table(NamedTuple):
    """`headings` stand alone. Within a sentence they may be names, such as `memory` in a list of settings."""

    whole: Mapping[str, str]
    headings: Mapping[str, str]
    sentences: tuple[_Sentence, ...]


@cache
def _table() -> _Table:
    content = json.loads(_FILE.read_text("utf-8"))
    headings, known = _known(content["headings"]), _known({**content["texts"], **content["words"]})
    with_holes = [_Sentence(english, own) for english, own in known.items() if _HOLE.search(english)]
    with_holes.sort(key=lambda sentence: sentence.size, reverse=True)  # of two readings, that with more fixed letters
    whole = {english: own for english, own in known.items() if not _HOLE.search(english)}
    return _Table(whole, headings, tuple(with_holes))


def _known(part: Mapping[str, str | None]) -> dict[str, str]:
    return {_core(english)[0]: own.rstrip("".join(_ENDS.values())) for english, own in part.items() if own}


def _core(text: str) -> tuple[str, str]:
    """The text as the table is searched for it, without its capital and its end; and the end in Chinese.

    >>> _core("Nothing ran."), _core("MFU is unknown:")
    (('nothing ran', '。'), ('MFU is unknown', '：'))
    """
    end = "" if text.endswith("..") else _ENDS.get(text[-1:], "")
    core = text[:-1] if end else text
    is_word = core[:1].isupper() and not core[1:2].isupper() and core[1:2] != ":"
    return (core[0].lower() + core[1:] if is_word else core), end


@lru_cache(maxsize=8192)
def _translation(text: str, depth: int = 0) -> _Translation:
    """The reading of the text that leaves the fewest English words."""
    found = _Translation(len(_ENGLISH_WORD.findall(text)), text)
    if found.left and len(text) <= _MOST_LETTERS and depth <= _DEEPEST:
        for candidate in _readings(text, depth + 1):
            found = min(found, candidate, key=lambda each: each.left)
            if not found.left:
                break
    return found


def _readings(text: str, depth: int) -> Iterator[_Translation]:
    core, end = _core(stripped := text.strip())
    before, _, after = text.partition(stripped)
    table = _table()
    for known in (table.whole, table.headings if depth == 1 else {}):
        if core in known:
            yield _Translation(0, before + known[core] + end + after)
            return
    matches: dict[str, list[tuple[_Sentence, Mapping[int, str]]]] = {"clause": [], "sentence": [], "several": []}
    begin = stripped[:1] + core[1:]  # a value at the beginning keeps its capital
    for sentence in table.sentences:
        values = sentence.values(core if sentence.has_beginning else begin)
        if values is not None and all(len(value) < len(core) for value in values.values()):
            matches[_most_in(values.values())].append((sentence, values))
    for size, found in matches.items():
        if size == "several":
            yield from _by_parts(text, depth)
        for sentence, values in found:
            own = {number: _translation(value, depth) for number, value in values.items()}
            filled = _filled(sentence.translation, {number: part.text for number, part in own.items()})
            yield _Translation(sum(part.left for part in own.values()), before + filled + end + after)


def _most_in(values: Collection[str]) -> str:
    """What the largest value of a hole is. Of equally good readings the first wins: that whose holes hold least.

    >>> _most_in(["4", "resumed"]), _most_in(["4: resumed"]), _most_in(["3 windows. Peak: unknown"])
    ('clause', 'sentence', 'several')
    """
    if any(". " in value or "\n" in value for value in values):
        return "several"
    return "sentence" if any(": " in value or "; " in value for value in values) else "clause"


def _filled(translation: str, values: Mapping[int, str]) -> str:
    """The translation with its values: a space between Chinese and other words, none between Chinese and Chinese.

    >>> _filled("在 {0} 阶段", {0: "构建"}), _filled("{0}不稳定", {0: "ghost"})
    ('在构建阶段', 'ghost 不稳定')
    """
    filled = ""
    for place, part in enumerate(_HOLE.split(translation)):
        piece = values[int(part)] if place % 2 else part
        left, right = filled.rstrip(" ")[-1:], piece.lstrip(" ")[:1]
        chinese = [_HAN.match(letter) is not None for letter in (left, right)]
        if all(chinese):
            filled, piece = filled.rstrip(" "), piece.lstrip(" ")
        elif any(chinese) and filled[-1:].isalnum() and piece[:1].isalnum():
            filled += " "
        filled += piece
    return filled


def _by_parts(text: str, depth: int) -> Iterator[_Translation]:
    if (match := _LABELLED.fullmatch(text)) is not None and ". " in match[2]:
        label, after = _translation(match[1], depth), _translation(match[2], depth)
        yield _joined("：", [label, after])
    for joint, own in _BETWEEN_SENTENCES:
        # A point behind `...` is that of an example.
        sentences = re.split(rf"(?<!\.){re.escape(joint)}" if joint == ". " else joint, text.rstrip())
        if len(sentences) > 1:
            parts = [_translation(part, depth) for part in _sentences(sentences, joint)]
            yield _joined(own, parts)
            return
    for joint, own in _WITHIN_SENTENCES:
        if text.startswith(joint) and _HAN.search((after := _translation(text[2:], depth)).text, 0, _SEEN[joint]):
            yield _joined(own, [_Translation(0, ""), after])
        for place in (match.start() for match in re.finditer(re.escape(joint), text) if match.start()):
            before, after, with_joint = (
                _translation(part, depth) for part in (text[:place], text[place + 2 :], text[place:])
            )
            as_it_is, in_chinese = _joined("", [before, with_joint]), _joined(own, [before, after])
            is_chinese = _wants_chinese(_JOINTS.split(before.text)[-1], _JOINTS.split(after.text)[0])
            candidates = (in_chinese, as_it_is) if is_chinese else (as_it_is, in_chinese)
            yield min(candidates, key=lambda each: each.left)
    if (match := _IN_BRACKETS.fullmatch(text)) is not None:
        before, inside, after = (_translation(part, depth) for part in match.groups())
        yield _Translation(before.left + inside.left + after.left, f"{before.text}（{inside.text}）{after.text}")


def _wants_chinese(before: str, after: str) -> bool:
    """Whether a Chinese comma suits between two parts: not in a list of names or numbers."""
    return bool(_HAN.match(before[-1:]) or _HAN.match(after[:1]) or (_HAN.search(before) and _HAN.search(after)))


def _sentences(parts: Sequence[str], joint: str) -> Iterator[str]:
    """The sentences. Those that are one text of the table stay together."""
    start, whole = 0, _table().whole
    while start < len(parts):
        together = (joint.join(parts[start:end]) for end in range(len(parts), start, -1))
        found = next((text for text in together if _core(text)[0] in whole), parts[start])
        yield found
        start += found.count(joint) + 1


def _joined(joint: str, parts: Sequence[_Translation]) -> _Translation:
    return _Translation(sum(part.left for part in parts), joint.join(part.text for part in parts))
