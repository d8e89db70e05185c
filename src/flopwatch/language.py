"""Shows texts in the reader's language. Standard library only.

Everything in the house says and stores English. What shows a text to a person (a terminal, a page, an error) passes it
through `shown`, which finds the English sentence in the table of the language by its fixed words, and puts the values
into the translated one. So files, JSON and CSV cannot change with the language, and a log written years ago, or by a
process with another language, is shown in the reader's. gettext looks a message up where it is said, before its values
are known; it could do neither.

The table of a language is `translations/LANGUAGE.json`: English, with the values as {0}, {1}, to its translation. Null
marks a text that no person is shown. `tests/test_chinese.py` fails if the table lacks a text of the source.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

ENGLISH, CHINESE = "en", "zh"
LANGUAGES = (ENGLISH, CHINESE)
_SETTING = "FLOPWATCH_LANG"
_FOLDER = Path(__file__).parent / "translations"
_chosen: dict[str, str] = {}
_LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The order in which POSIX reads them: the first that is set decides."""


def language() -> str:
    """`zh` or `en`: the environment variable FLOPWATCH_LANG, or else what was chosen, or else the locale."""
    asked = os.environ.get(_SETTING) or _chosen.get(_SETTING) or next(filter(None, map(os.environ.get, _LOCALES)), "")
    return CHINESE if asked.lower().startswith(CHINESE) else ENGLISH


def choose(language: str) -> None:
    """The language of this process, as the setting `language` of the monitor says; `auto` is that of the locale."""
    _chosen[_SETTING] = "" if language == "auto" else language


def shown(text: str) -> str:
    """The text in the reader's language; what the table does not have stays as it is.

    >>> shown("3 trials left")
    '3 trials left'
    """
    return text if language() == ENGLISH else translated(text)


def translated(text: str, to: str = CHINESE) -> str:
    """The text in another language.

    >>> translated("12 trials")
    '12 个 trial'
    """
    if not _WORD.search(text):
        return text
    return _translation(text, to).text


_WORD = re.compile(r"[A-Za-z]{2}")
_ENGLISH_WORD = re.compile(r"(?<![\w/.`$<-])[A-Za-z]?[a-z]{2,}(?![\w/`=>-])")
"""A word of a sentence, not a part of a path, a flag or a name. How many are left is the measure of a translation."""
_HOLE = re.compile(r"\{(\d+)\}")
_ENDS = {".": "。", ":": "：", "?": "？"}
_BETWEEN_SENTENCES = (("\n", "\n"), (". ", "。"))
_WITHIN_SENTENCES = (("; ", "；"), (": ", "："), (", ", "，"))
_IN_BRACKETS = re.compile(r"(.*?) ?\((.*)\)(.*)", re.DOTALL)
_HAN = re.compile("[\u4e00-\u9fff]")
_MOST_LETTERS = 4000
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
        self.size = sum(map(len, self._literals))
        self.translation = translation

    def values(self, text: str) -> Mapping[int, str] | None:
        """What stands in the holes, if the text is this sentence."""
        if self._anchor not in text:
            return None
        match = self._pattern.fullmatch(text)
        return None if match is None else dict(zip(self._order, match.groups(), strict=True))

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        """In a short sentence, a hole is a word; in `{0} trials`, a number. Of adjacent holes, the first takes all."""
        hole = r"(\S+)" if self.size < _SHORT else "(.*?)"
        first, *others = self._literals
        if not first and len(others) == 1 and others[0].strip().isalpha():
            hole = r"(\d\S*)"
        pattern = re.escape(first)
        for place, literal in enumerate(others):
            pattern += ("()" if place and not self._literals[place] else hole) + re.escape(literal)
        return re.compile(pattern, re.DOTALL)


class _Table(NamedTuple):
    whole: Mapping[str, str]
    sentences: tuple[_Sentence, ...]


@cache
def _table(to: str) -> _Table:
    content = json.loads((_FOLDER / f"{to}.json").read_text("utf-8"))
    known = {
        _core(english)[0]: own.rstrip("".join(_ENDS.values()))
        for part in content.values()
        for english, own in part.items()
        if own
    }
    with_holes = [_Sentence(english, own) for english, own in known.items() if _HOLE.search(english)]
    with_holes.sort(key=lambda sentence: sentence.size, reverse=True)  # of two readings, that with more fixed letters
    return _Table({english: own for english, own in known.items() if not _HOLE.search(english)}, tuple(with_holes))


def _core(text: str) -> tuple[str, str]:
    """The text as the table is searched for it, without its capital and its end; and the end in Chinese.

    >>> _core("Nothing ran."), _core("MFU is unknown:")
    (('nothing ran', '。'), ('MFU is unknown', '：'))
    """
    end = "" if text.endswith("..") else _ENDS.get(text[-1:], "")
    core = text[:-1] if end else text
    is_word = core[:1].isupper() and not core[1:2].isupper()
    return (core[0].lower() + core[1:] if is_word else core), end


@lru_cache(maxsize=8192)
def _translation(text: str, to: str, depth: int = 0) -> _Translation:
    """The reading of the text that leaves the fewest English words."""
    found = _Translation(len(_ENGLISH_WORD.findall(text)), text)
    if found.left and len(text) <= _MOST_LETTERS and depth <= _DEEPEST:
        for candidate in _readings(text, to, depth + 1):
            found = min(found, candidate, key=lambda each: each.left)
            if not found.left:
                break
    return found


def _readings(text: str, to: str, depth: int) -> Iterator[_Translation]:
    core, end = _core(stripped := text.strip())
    before, _, after = text.partition(stripped)
    table = _table(to)
    if core in table.whole:
        yield _Translation(0, before + table.whole[core] + end + after)
        return
    for sentence in table.sentences:
        values = sentence.values(core)
        if values is not None and all(len(value) < len(core) for value in values.values()):
            own = {number: _translation(value, to, depth) for number, value in values.items()}
            filled = _filled(sentence.translation, {number: part.text for number, part in own.items()})
            yield _Translation(sum(part.left for part in own.values()), before + filled + end + after)
    yield from _by_parts(text, to, depth)


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


def _by_parts(text: str, to: str, depth: int) -> Iterator[_Translation]:
    for joint, own in _BETWEEN_SENTENCES:
        if joint in text.rstrip():
            parts = [_translation(part, to, depth) for part in _sentences(text.split(joint), joint, to)]
            yield _joined(own, parts)
            return
    for joint, own in _WITHIN_SENTENCES:
        for place in (match.start() for match in re.finditer(re.escape(joint), text) if match.start()):
            before, after, with_joint = (
                _translation(part, to, depth) for part in (text[:place], text[place + 2 :], text[place:])
            )
            as_it_is, in_chinese = _joined("", [before, with_joint]), _joined(own, [before, after])
            is_chinese = _HAN.search(before.text.rpartition(joint)[2]) or _HAN.search(after.text.partition(joint)[0])
            candidates = (in_chinese, as_it_is) if is_chinese else (as_it_is, in_chinese)
            yield min(candidates, key=lambda each: each.left)
    if (match := _IN_BRACKETS.fullmatch(text)) is not None:
        before, inside, after = (_translation(part, to, depth) for part in match.groups())
        yield _Translation(before.left + inside.left + after.left, f"{before.text}（{inside.text}）{after.text}")


def _sentences(parts: Sequence[str], joint: str, to: str) -> Iterator[str]:
    """The sentences. Those that are one text of the table stay together."""
    start, whole = 0, _table(to).whole
    while start < len(parts):
        together = (joint.join(parts[start:end]) for end in range(len(parts), start, -1))
        found = next((text for text in together if _core(text)[0] in whole), parts[start])
        yield found
        start += found.count(joint) + 1


def _joined(joint: str, parts: Sequence[_Translation]) -> _Translation:
    return _Translation(sum(part.left for part in parts), joint.join(part.text for part in parts))
