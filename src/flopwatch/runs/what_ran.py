"""What ran, in words: the facts of `RunStart.what_ran`, for pages and commands."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from flopwatch.records.run import RunStart
from flopwatch.text import one_line

_SHORT_COMMIT = 12


def what_ran(start: RunStart | None) -> list[tuple[str, str]]:
    """Label and text of each fact that the log has; empty if the run was told to log none of them.

    >>> git = {"commit": "0123456789abcdef", "branch": "main", "dirty": True}
    >>> what_ran(RunStart("a", 0.0, "out", what_ran={"script": "t.py", "arguments": ["--lr", "1 2"], "git": git}))
    [('script', 't.py'), ('arguments', "--lr '1 2'"), ('git commit', '0123456789ab (main), with changes')]
    """
    facts = {} if start is None else start.what_ran
    git = facts.get("git")
    found = {
        "script": facts.get("script"),
        "arguments": _arguments(facts.get("arguments")),
        "working folder": facts.get("folder"),
        "git commit": _commit(git) if isinstance(git, Mapping) else None,
        "user": facts.get("user"),
        "job": _pairs(facts.get("job")),
        "packages": _pairs(facts.get("packages")),
    }
    return [(label, one_line(str(text), _LONGEST)) for label, text in found.items() if text]


_LONGEST = 2000


def _arguments(arguments: Any) -> str:
    if not isinstance(arguments, Sequence) or isinstance(arguments, str):
        return ""
    return " ".join(shlex.quote(str(argument)) for argument in arguments)


def _commit(git: Mapping[str, Any]) -> str:
    branch = f" ({git['branch']})" if git.get("branch") else ""
    return f"{str(git.get('commit'))[:_SHORT_COMMIT]}{branch}{', with changes' if git.get('dirty') else ''}"


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, Mapping) else ""
