"""Carries what a command writes into an English page over to the Chinese page of the same name.

The two pages are the dictionary: a paragraph, a list entry or a cell that was in the English part before has its
translation at the same place of the Chinese part. It is used again, with the new numbers. What is new stays English
until somebody translates it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_LAST_COMMENT = re.compile(r"\n*(<!--[^\n]*-->\s*)?\Z")


def carry_over(page: Path, old: str, new: str, markers: tuple[str, str] | None = None) -> None:
    """Write into the Chinese page, between the markers or all of it, what has become of `old` in the English page."""
    candidates = (docs / "zh" / page.relative_to(docs) for docs in page.parents)
    chinese = next(filter(Path.exists, candidates), None)
    if chinese is None:
        return
    text = chinese.read_text(encoding="utf-8")
    begin, end = 0, _LAST_COMMENT.search(text).start()  # type: ignore[union-attr]  # matches the empty end too
    if markers:
        begin = text.index(markers[0]) + len(markers[0])
        end = text.index(markers[1], begin)
    try:
        part = translated(new.strip("\n"), old.strip("\n"), text[begin:end].strip("\n"))
    except ValueError as error:
        print(f"{chinese} stays as it is: {error}")
        return
    around = re.match(r"\n*", text[begin:end]).group() if markers else ""  # type: ignore[union-attr]
    chinese.write_text(f"{text[:begin]}{around}{part}{around}{text[end:]}", encoding="utf-8")


def translated(new: str, old: str, old_chinese: str) -> str:
    """`new` in Chinese, as far as `old` and its translation have the words."""
    english, chinese = list(_units(old)), list(_units(old_chinese))
    if len(english) != len(chinese):
        raise ValueError(f"the English part has {len(english)} pieces, the Chinese one {len(chinese)}")
    known = {
        (kind, _NUMBER.sub("0", words)): (words, translation)
        for (kind, words), (_, translation) in zip(english, chinese, strict=True)
    }
    return "".join(_with_numbers(words, known.get((kind, _NUMBER.sub("0", words)))) for kind, words in _units(new))


def _units(text: str) -> Iterator[tuple[str, str]]:
    """Paragraphs, list entries and cells, and what is between them; joined, they are the text."""
    for block in re.split(r"(\n{2,})", text):
        if block.startswith("|"):
            for number, line in enumerate(block.splitlines(keepends=True)):
                yield from (("row" if number else "head", cell) for cell in re.split(r"( ?(?<!\\)\| ?|\n)", line))
        else:
            yield from (("text", entry) for entry in re.split(r"(\n(?=- ))", block))


def _with_numbers(words: str, known: tuple[str, str] | None) -> str:
    """The translation of the same words with other numbers, if it has its numbers in the order of the English words."""
    if known is None:
        return words
    old_words, translation = known
    if words == old_words:
        return translation
    if _NUMBER.findall(translation) != _NUMBER.findall(old_words):
        return words
    numbers = iter(_NUMBER.findall(words))
    return _NUMBER.sub(lambda _: next(numbers), translation)
