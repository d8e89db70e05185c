"""Shows texts in the reader's language. Standard library only.

Everything in the house says and stores English. What shows a text to a person (a terminal, a page, an error) passes it
through `shown`, which finds the English sentence in a table (`translations/`) by its fixed words, and puts the values
into the Chinese one. So files, JSON and CSV cannot change with the language, and a log written years ago, or by a
process with another language, is shown in the reader's. gettext looks a message up where it is said, before its values
are known; it could do neither.
"""

import os
import sys

ENGLISH, CHINESE = "en", "zh"
_SETTING = "FLOPWATCH_LANG"
_LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The order in which POSIX reads them: the first that is set decides."""
_chosen: dict[str, str] = {}


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


def shown(text: str) -> str:
    """The text in the reader's language; what the table does not have stays as it is.

    >>> shown("3 trials left")
    '3 trials left'
    """
    try:
        if language() == ENGLISH:
            return text
        from flopwatch.translations import translated  # compiles patterns, which English readers do not need

        return translated(text)
    except Exception:  # noqa: BLE001 - the caller may be a training: it shows the text in English then
        return text
