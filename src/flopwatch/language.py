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
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ENGLISH, CHINESE = "en", "zh"
_SETTING = "FLOPWATCH_LANG"
_LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The order in which POSIX reads them: the first that is set decides."""
_PLACE = re.compile(r"\{(\w+)\}")
_chosen: dict[str, str] = {}


class Said(str):
    """An English sentence or label that can be shown in another language.

    >>> Said("{share} of the step waits for input", share="12 %")
    '12 % of the step waits for input'

    Attributes:
        template: The sentence with named places, which the translation is found by.
        values: What stands in the places: texts that stay as they are, or again something said.
    """

    template: str
    values: Mapping[str, str]

    def __new__(cls, template: str, /, **values: Any) -> "Said":
        """Fill the template; a value that is not a str is written as `str` writes it."""
        texts = {name: value if isinstance(value, str) else str(value) for name, value in values.items()}
        return restored(_filled(template, texts), template, texts)

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
    texts = {"n": f"{amount:,}", **values}
    return restored(_filled(one if amount == 1 else many, texts), one, texts)


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Not `str.format`: a template may come from a file."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


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
    if template == text.template:
        return str(text)
    return _filled(template, {name: _translated(value) for name, value in text.values.items()})


@cache
def _catalog() -> gettext.NullTranslations:
    """The compiled sentences; without the file, everything is English."""
    return gettext.translation("flopwatch", Path(__file__).parent / "locale", [CHINESE], fallback=True)
