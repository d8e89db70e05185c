"""Finds the Chinese of an English text. Standard library only.

The table, `zh.json`, has English sentences with the values as {0}, {1}, and their translations:

- `texts` are all sentences of the source. `tests/test_chinese.py` fails if one is missing. Null: no person is shown it.
- `words` are words, and sentences that the source joins from pieces.
- `headings` are words that are found only where they are all that is shown. Within a sentence they may be names.

A sentence is found by its fixed words. What stands in the holes is translated the same way; `{0!}` in the translation
says that it is a name, such as that of a folder, which stays as it is. A text that is no sentence of the table is tried
by its sentences and their parts. Of all readings, the one that leaves the fewest English words wins; what the table
does not have stays as it is.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_name("zh.json")


def translated(text: str) -> str:
    """The text in Chinese.

    >>> translated("12 trials")
    '12 个 trial'
    """
    return _of_text(text) if len(text) <= _MOST_LETTERS and _WORD.search(text) else text


@lru_cache(maxsize=4096)
def _of_text(text: str) -> str:
    said = _Reader().translation(text).text
    return said if said == text else _ENGLISH_SPACE.sub("", said)


_WORD = re.compile(r"[A-Za-z]{2}")
_ENGLISH_WORD = re.compile(r"(?<![\w/.`$<-])[A-Za-z]?[a-z]{2,}(?:-[a-z]+)*(?![\w/`=>-])")
"""A word of a sentence, not a part of a path, a flag or a name. How many are left is the measure of a translation."""
_ENGLISH_SPACE = re.compile(r" +(?=[，。；：、（）])|(?<=[，。；：、）]) +(?=[\u4e00-\u9fff])")
"""A space that a piece of a sentence had in English, beside a Chinese comma or bracket."""
_HOLE = re.compile(r"\{(\d+)\}")
_NAME = re.compile(r"\{(\d+)!\}")
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
_AMOUNT = r"[~≥≈±-]?\d\S* (?:[KMGTP]iB|B|ms|s|min|h|d|%|[kMGTPEZ]?FLOP(?:/s)?|[mkMGT]?J)"
_ONE_VALUE = re.compile(rf"{_AMOUNT}(?: {_AMOUNT})?|\S*[^\s:;,]")
_NUMBER = re.compile(r"\d\S*")
_GRAMMAR = re.compile(r"[A-Za-z]*")
"""What Chinese may leave out: a plural or a verb, such as `{1}` in `{0} trial{1}`."""
_COUNTED = re.compile(r"\{0\} [个条行步次对种台块]")
_HAN = re.compile("[\u4e00-\u9fff]")
_DEEPEST = 8
_SHORT = 16
_MOST_TOGETHER = 8
"""Sentences that are one text of the table: there are five at most."""
_MOST_EFFORT, _EFFORT_OF_A_PART = 120_000, 25
"""Letters that are read for one text. A real one takes up to 88,000; a list of a hundred names would take millions."""
_LETTERS = re.compile("[A-Za-z]+")
_PLAIN_WORD = re.compile("(?<![A-Za-z{}])[A-Za-z]+(?![A-Za-z{}])")


class _Translation(NamedTuple):
    """`left` is how many English words it still has."""

    left: int
    text: str


class _Sentence:
    """An English sentence with holes, and its translation."""

    def __init__(self, english: str, translation: str) -> None:
        parts = _HOLE.split(english)
        literals, order = parts[::2], [int(number) for number in parts[1::2]]
        self.translation = translation.replace("!}", "}")
        self.names = {int(number) for number in _NAME.findall(translation)}
        self.has_beginning = bool(literals[0])
        self.size = sum(map(len, literals))
        self.anchor = max(literals, key=len)
        # Of adjacent holes, the first takes all.
        self._alone = [number for number, literal in zip(order[1:], literals[1:-1], strict=True) if not literal]
        self._order = [number for number in order if number not in self._alone]
        self._literals = [literals[0], *filter(None, literals[1:-1]), literals[-1]]
        own = [int(number) for number in _HOLE.findall(self.translation)]
        self._left_out = {*order} - {*own}
        self._is_turned = own != sorted(own, key=order.index)
        self._value = self._allowed()

    def values(self, text: str) -> Mapping[int, str] | None:
        """What stands in the holes, if the text is this sentence. No hole ends within brackets.

        Where it could be divided in two ways, and Chinese has the values in another order, it is not known which.
        """
        if self.anchor not in text or (found := _divided(text, self._literals, self._value)) is None:
            return None
        if not self.has_beginning and ": " in found[0]:
            return None
        if _is_closed(text) and not all(map(_is_closed, found)):
            return None
        if self._is_turned and found != _divided(text, self._literals, self._value, from_end=True):
            return None
        values = dict(zip(self._order, found, strict=True)) | dict.fromkeys(self._alone, "")
        return values if all(_GRAMMAR.fullmatch(values[number]) for number in self._left_out) else None

    def _allowed(self) -> re.Pattern[str] | None:
        """In a short sentence, a hole is a word or an amount; in `{0} trials`, a number; in `next: {0}`, all."""
        first, *others = self._literals
        if _LABEL.fullmatch(first) and others == [""]:
            return None
        is_counted = _COUNTED.match(self.translation) or others[0].strip().isalpha()
        if not first and ((len(others) == 1 and is_counted) or others == [" of ", ""]):
            return _NUMBER
        return _ONE_VALUE if self.size < _SHORT else None


def _named(value: str) -> _Translation:
    """A name as it is. Of one word, it counts as translated; several words may be a sentence that is none."""
    return _Translation(len(_ENGLISH_WORD.findall(value)) if " " in value else 0, value)


def _divided(
    text: str, literals: Sequence[str], allowed: re.Pattern[str] | None, *, from_end: bool = False
) -> list[str] | None:
    """What stands between the literals: each value is the shortest that is allowed, from the left or from the end.

    A regular expression would try all divisions, of which a long text has more than can be tried.
    """
    first, *between, last = literals
    if not (text.startswith(first) and text.endswith(last) and len(first) + len(last) <= len(text)):
        return None
    rest, values = text[len(first) : len(text) - len(last)], []
    for literal in reversed(between) if from_end else between:
        place = rest.rfind(literal) if from_end else rest.find(literal)
        while place >= 0:
            value, others = rest[:place], rest[place + len(literal) :]
            if from_end:
                value, others = others, value
            if allowed is None or allowed.fullmatch(value):
                break
            place = rest.rfind(literal, 0, place + len(literal) - 1) if from_end else rest.find(literal, place + 1)
        if place < 0:
            return None
        values.append(value)
        rest = others
    if allowed is not None and not allowed.fullmatch(rest):
        return None
    return [rest, *reversed(values)] if from_end else [*values, rest]


def _is_closed(text: str) -> bool:
    return text.count("(") == text.count(")")


class _Table(NamedTuple):
    """`headings` stand alone. Within a sentence they may be names, such as `memory` in a list of settings.

    Of two readings, that with more fixed letters comes first. `by_word` has the numbers of the sentences with a word.
    """

    whole: Mapping[str, str]
    headings: Mapping[str, str]
    sentences: Sequence[_Sentence]
    by_word: Mapping[str, Sequence[int]]

    def sentences_in(self, text: str) -> Iterator[_Sentence]:
        """Those whose longest word the text has, because most texts have no word of most sentences."""
        numbers = {number for word in {"", *_LETTERS.findall(text)} for number in self.by_word.get(word, ())}
        return (self.sentences[number] for number in sorted(numbers))


@cache
def _table() -> _Table:
    """What `zh.json` says; if it cannot be used, nothing, so that every text stays English."""
    try:
        content = json.loads(_FILE.read_text("utf-8"))
        headings, known = _known(content["headings"]), _known({**content["texts"], **content["words"]})
        found = [
            (_Sentence(english, own), _longest_word(english)) for english, own in known.items() if _HOLE.search(english)
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _Table({}, {}, (), {})
    found.sort(key=lambda each: each[0].size, reverse=True)
    by_word: dict[str, list[int]] = {}
    for number, (_, word) in enumerate(found):
        by_word.setdefault(word, []).append(number)
    whole = {english: own for english, own in known.items() if not _HOLE.search(english)}
    return _Table(whole, headings, [sentence for sentence, _ in found], by_word)


def _longest_word(english: str) -> str:
    """Of those that are whole words in any text with this sentence: a word beside a hole may continue in its value."""
    return max(_PLAIN_WORD.findall(_HOLE.sub("{}", english)), key=len, default="")


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


class _Reader:
    """Finds the reading of one text that leaves the fewest English words. What takes too long to read stays English."""

    def __init__(self) -> None:
        self._effort = _MOST_EFFORT
        self._known: dict[str, tuple[int, _Translation]] = {}

    def translation(self, text: str, depth: int = 0) -> _Translation:
        self._effort -= _EFFORT_OF_A_PART
        known_depth, known = self._known.get(text, (0, None))
        if known is not None and known_depth <= depth:
            return known
        found = _Translation(len(_ENGLISH_WORD.findall(text)), text)
        self._effort -= len(text)
        if found.left and depth <= _DEEPEST and self._effort > 0:
            for candidate in self._readings(text, depth + 1):
                found = min(found, candidate, key=lambda each: each.left)
                if not found.left or self._effort < 0:
                    break
        if depth:  # at depth 0 it may be a heading
            self._known[text] = depth, found
        return found

    def _readings(self, text: str, depth: int) -> Iterator[_Translation]:
        core, end = _core(stripped := text.strip())
        before, _, after = text.partition(stripped)
        table = _table()
        for known in (table.whole, table.headings if depth == 1 else {}):
            if core in known:
                yield _Translation(0, before + known[core] + end + after)
                return
        matches: dict[str, list[tuple[_Sentence, Mapping[int, str]]]] = {"clause": [], "sentence": [], "several": []}
        begin = stripped[:1] + core[1:]  # a value at the beginning keeps its capital
        for sentence in table.sentences_in(core):
            values = sentence.values(core if sentence.has_beginning else begin)
            if values is not None and all(len(value) < len(core) for value in values.values()):
                matches[_most_in(values.values())].append((sentence, values))
        for size, found in matches.items():
            if size == "several":
                yield from self._by_parts(text, depth)
            for sentence, values in found:
                own = {
                    number: _named(value) if number in sentence.names else self.translation(value, depth)
                    for number, value in values.items()
                }
                filled = _filled(sentence.translation, {number: part.text for number, part in own.items()})
                yield _Translation(sum(part.left for part in own.values()), before + filled + end + after)

    def _by_parts(self, text: str, depth: int) -> Iterator[_Translation]:
        if (match := _LABELLED.fullmatch(text)) is not None and ". " in match[2]:
            label, after = self.translation(match[1], depth), self.translation(match[2], depth)
            yield _joined("：", [label, after])
        for joint, own in _BETWEEN_SENTENCES:
            # A point behind `...` is that of an example.
            sentences = re.split(rf"(?<!\.){re.escape(joint)}" if joint == ". " else joint, text.rstrip())
            if len(sentences) > 1:
                parts = [self.translation(part, depth) for part in _sentences(sentences, joint)]
                yield _joined(own, parts)
                return
        for joint, own in _WITHIN_SENTENCES:
            if text.startswith(joint) and _HAN.search(
                (after := self.translation(text[2:], depth)).text, 0, _SEEN[joint]
            ):
                yield _joined(own, [_Translation(0, ""), after])
            for place in (match.start() for match in re.finditer(re.escape(joint), text) if match.start()):
                if self._effort < 0:
                    return
                pieces = text[:place], text[place + 2 :], text[place:]
                before, after, with_joint = parts = [self.translation(piece, depth) for piece in pieces]
                if all(part.text == piece for part, piece in zip(parts, pieces, strict=True)):
                    continue
                as_it_is, in_chinese = _joined("", [before, with_joint]), _joined(own, [before, after])
                is_chinese = _wants_chinese(_JOINTS.split(before.text)[-1], _JOINTS.split(after.text, 1)[0])
                candidates = (in_chinese, as_it_is) if is_chinese else (as_it_is, in_chinese)
                yield min(candidates, key=lambda each: each.left)
        if (match := _IN_BRACKETS.fullmatch(text)) is not None:
            before, inside, after = (self.translation(part, depth) for part in match.groups())
            yield _Translation(before.left + inside.left + after.left, f"{before.text}（{inside.text}）{after.text}")


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
    filled, parts = "", _HOLE.split(translation)
    for place, part in enumerate(parts):
        piece = values[int(part)] if place % 2 else part
        left, right = filled.rstrip(" ")[-1:], piece.lstrip(" ")[:1]
        chinese = [_HAN.match(letter) is not None for letter in (left, right)]
        if all(chinese):
            filled, piece = filled.rstrip(" "), piece.lstrip(" ")
        elif any(chinese) and filled[-1:].isalnum() and piece[:1].isalnum():
            filled += " "
        elif place % 2 and place > 1 and not parts[place - 1] and filled[-1:].strip() and piece[:1].strip():
            filled += " "  # two values that stood apart in English
        filled += piece
    return filled


def _wants_chinese(before: str, after: str) -> bool:
    """Whether a Chinese comma suits between two parts: not in a list of names or numbers."""
    return bool(_HAN.match(before[-1:]) or _HAN.match(after[:1]) or (_HAN.search(before) and _HAN.search(after)))


def _sentences(parts: Sequence[str], joint: str) -> Iterator[str]:
    """The sentences. Those that are one text of the table stay together."""
    start, whole = 0, _table().whole
    while start < len(parts):
        most = min(len(parts), start + _MOST_TOGETHER)
        together = ((joint.join(parts[start:end]), end) for end in range(most, start, -1))
        found, start = next((each for each in together if _core(each[0])[0] in whole), (parts[start], start + 1))
        yield found


def _joined(joint: str, parts: Sequence[_Translation]) -> _Translation:
    return _Translation(sum(part.left for part in parts), joint.join(part.text for part in parts))
