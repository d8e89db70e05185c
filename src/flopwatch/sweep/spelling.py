"""What a misspelt name may have meant."""

import difflib
from collections.abc import Iterable

from flopwatch.plain_text import one_line


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: the name that was likely meant, else all there are.

    >>> did_you_mean("batchsize", ["batch_sizes", "steps"])
    "; did you mean 'batch_sizes'?"
    >>> did_you_mean("speed", ["lr", "steps"])
    '; there are lr, steps'
    """
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(one_line(name, 100).lower(), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if names else ""
