"""What flopwatch says to people, in the reader's language. Standard library only.

Everything in the house says and stores English. A `Said` is an English sentence that remembers the template it was made
from and the values in it. What shows a text to a person (a terminal, a page, a console) passes it through `_`, which
looks the template up in `locale/` with gettext and puts the values in. So files, JSON and CSV cannot change with the
language, a log from an English machine is shown in the reader's language, and names of users, which are only ever
values or plain texts, are never translated.
"""

import gettext
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeAlias

Templates: TypeAlias = Mapping[str, str]
"""The type of a table of templates by code."""
ENGLISH, CHINESE = "en", "zh"
_SETTING = "FLOPWATCH_LANG"
_LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The order in which POSIX reads them: the first that is set decides."""
_PLACE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_DEEPEST = 50
_chosen: dict[str, str] = {}


class Said(str):
    """An English sentence or label that can be shown in another language.

    >>> Said("{share:.0%} of {what} waits for input", share=0.12, what=Said("the step"))
    '12% of the step waits for input'

    Attributes:
        template: The sentence with named places, which the translation is found by.
        values: What stands in the places: texts that stay as they are, or again something said.
    """

    template: str
    values: Mapping[str, str]

    def __new__(cls, template: str, /, **values: Any) -> "Said":
        """Fill the template; numbers become texts here, once for all languages."""
        places = {name: spec for name, spec in _PLACE.findall(template) if name in values}
        texts = {name: _text(values[name], spec) for name, spec in places.items()}
        return restored(_filled(template, texts), template, texts)

    def filled(self, **values: Any) -> "Said":
        """A sentence from a table of templates, with its values."""
        return Said(self.template, **values)

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (str(self), self.template, dict(self.values))


def restored(text: str, template: str, values: Mapping[str, str]) -> Said:
    """What another process said: its English text, and what it was made from."""
    said = str.__new__(Said, text)
    said.template, said.values = template, values
    return said


def counted(amount: int, one: str, many: str, /, **values: Any) -> Said:
    """A number `{n}` and a noun in the singular or plural.

    >>> counted(1, "{n} trial", "{n} trials"), counted(3000, "{n} trial", "{n} trials")
    ('1 trial', '3,000 trials')
    """
    texts = {"n": f"{amount:,}", **{name: _text(value, "") for name, value in values.items()}}
    return restored(_filled(one if amount == 1 else many, texts), one, texts)


def _row(pair: Said) -> Callable[[Iterable[str | None]], str]:
    """A function that puts texts in a row, two by two; empty ones are left out, and a single one stays as it is."""

    def in_a_row(texts: Iterable[str | None]) -> str:
        known = [text for text in texts if text]
        return reduce(lambda first, text: pair.filled(first=first, next=text), known) if known else ""

    return in_a_row


def in_words(templates: Templates, code: Any) -> str:
    """What a table says about a code; a code that it does not have stays as it is."""
    return Said(templates[code]) if code in templates else str(code)


def _text(value: Any, spec: str) -> str:
    return value if isinstance(value, str) and not spec else format(value, spec)


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Not `str.format`: a template may come from a file."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


commas, semicolons = _row(Said("{first}, {next}")), _row(Said("{first}; {next}"))
ands, sentences = _row(Said("{first} and {next}")), _row(Said("{first} {next}"))


def parts_of(*texts: str | None) -> dict[str, Any]:
    """What a record stores of the texts in it: by the English text, its template and values. Empty if nothing is said.

    >>> parts_of("of a user", Said("at step {step}", step=3))
    {'said': {'at step 3': ['at step {step}', {'step': '3'}]}}
    """
    said = {str(text): _parts(text) for text in texts if isinstance(text, Said)}
    return {"said": said} if said else {}


def _parts(said: Said) -> list[Any]:
    values = {name: _parts(text) if isinstance(text, Said) else text for name, text in said.values.items()}
    return [said.template, values]


def with_parts(value: Any, said: Any) -> Any:
    """A text of a record that was read, or a tuple or dict of texts, with the parts stored beside it."""
    if isinstance(value, str):
        parts = said.get(value) if isinstance(said, dict) else None
        return value if parts is None else _restored(parts, value)
    if isinstance(value, tuple):
        return tuple(with_parts(text, said) for text in value)
    if isinstance(value, dict):
        return {name: with_parts(text, said) for name, text in value.items()}
    return value


def _restored(parts: Any, text: str | None = None, depth: int = 0) -> str:
    match parts:
        case [str(template), dict(values)] if depth < _DEEPEST:
            texts = {str(name): _restored(value, depth=depth + 1) for name, value in values.items()}
            return restored(_filled(template, texts) if text is None else text, template, texts)
    return text or str(parts)


def language() -> str:
    """`zh` or `en`: the environment variable FLOPWATCH_LANG, or else what was chosen, or else the locale.

    Always `en` where the standard streams cannot show Chinese, because the reader would see escapes instead.
    """
    asked = os.environ.get(_SETTING) or _chosen.get(_SETTING) or next(filter(None, map(os.environ.get, _LOCALES)), "")
    if not asked.lower().startswith(CHINESE):
        return ENGLISH
    return CHINESE if _takes_chinese(sys.stdout) and _takes_chinese(sys.stderr) else ENGLISH


def _takes_chinese(stream: object) -> bool:
    """A stream without an encoding, such as a StringIO, takes any text."""
    try:
        "中".encode(getattr(stream, "encoding", None) or "utf-8")
    except (LookupError, ValueError, TypeError):  # not in this encoding; not one that Python has; a detached stream
        return False
    return True


def choose(language: str) -> None:
    """The language of this process, as the setting `language` of the monitor says; `auto` is that of the locale."""
    _chosen[_SETTING] = "" if language == "auto" else language


def _(text: str) -> str:
    """The text in the reader's language; a text that is not a `Said`, such as a name of the user, stays as it is."""
    return _translated(text) if isinstance(text, Said) and language() == CHINESE else text


def _translated(text: str) -> str:
    if not isinstance(text, Said):
        return text
    template = _catalog().gettext(text.template)
    if not template:  # of another version of flopwatch, in a log
        return str(text)
    return _filled(template, {name: _translated(value) for name, value in text.values.items()})


class _Unknown(gettext.NullTranslations):
    def gettext(self, message: str) -> str:
        return ""


@cache
def _catalog() -> gettext.NullTranslations:
    """The compiled sentences; without the file, everything is English."""
    catalog = gettext.translation("flopwatch", Path(__file__).parent / "locale", [CHINESE], fallback=True)
    catalog.add_fallback(_Unknown())
    return catalog
