"""Numbers as people read them; an unknown one is a dash."""

from math import isfinite

UNKNOWN = "–"
_OUTCOME_WORDS = {
    "ok": "ok",
    "oom_device": "OOM",
    "oom_host": "OOM host",
    "oom_inferred": "OOM*",
    "unsupported": "n/a",
    "missing": "missing",
}


def outcome_word(outcome: str) -> str:
    """As in a matrix; `OOM*` was not run, a smaller one was out of memory already.

    >>> outcome_word("oom_inferred"), outcome_word("hang")
    ('OOM*', 'hang')
    """
    return _OUTCOME_WORDS.get(outcome, outcome)


def digits(value: float | None) -> str:
    """Three digits or so.

    >>> digits(2.1466), digits(49668.2), digits(312.4), digits(None)
    ('2.15', '49,668', '312', '–')
    """
    if value is None or not isfinite(value):
        return UNKNOWN
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"


def memory(amount_bytes: float | None) -> str:
    """In binary units.

    >>> memory(3 * 2**30), memory(700 * 2**20), memory(None)
    ('3.00 GiB', '700 MiB', '–')
    """
    if amount_bytes is None:
        return UNKNOWN
    for unit, prefix in ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if amount_bytes >= unit:
            return f"{digits(amount_bytes / unit)} {prefix}B"
    return f"{amount_bytes:.0f} B"


def step_seconds(seconds: float | None) -> str:
    """Of a step: milliseconds below a second.

    >>> step_seconds(0.32649), step_seconds(2.5), step_seconds(None)
    ('326 ms', '2.50 s', '–')
    """
    if seconds is None:
        return UNKNOWN
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(1e3 * seconds)} ms"


def duration(seconds: float | None) -> str:
    """Two units at most.

    >>> duration(42.4), duration(3840), duration(200_000)
    ('42 s', '1 h 04 min', '2 d 8 h')
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def share(value: float | None) -> str:
    """A fraction in percent.

    >>> share(0.4127), share(1.0), share(0.00042), share(None)
    ('41.3 %', '100 %', '0.042 %', '–')
    """
    if value is None:
        return UNKNOWN
    if value in (0, 1):
        return f"{value:.0%}".replace("%", " %")
    return f"{100 * value:.1f} %" if value >= 0.01 else f"{100 * value:.2g} %"


def factor(value: float | None) -> str:
    """Times as much.

    >>> factor(2.456), factor(None)
    ('2.46×', '–')
    """
    return UNKNOWN if value is None else f"{digits(value)}×"


def count(value: float | None) -> str:
    """With a prefix.

    >>> count(42_000_000), count(950)
    ('42.0 M', '950')
    """
    if value is None:
        return UNKNOWN
    for unit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{digits(value / unit)} {prefix}"
    return f"{value:.0f}"
