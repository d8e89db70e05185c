"""Numbers as every screen, log line and report of flopwatch writes them: one function per quantity.

An unknown value (None) is a dash. `digits` counts significant digits: three are enough to compare trials in a table,
four fit where a screen shows a single run. No value that is not 0 is written as 0. Standard library only.
"""

from collections.abc import Sequence
from math import isfinite

UNKNOWN = "–"
_FLOP_PREFIXES = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNT_PREFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""B and not G: models and datasets are counted in billions."""
_BINARY_PREFIXES = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
_ROUNDS_UP = 0.9995
"""From this share of a unit on, three digits of the smaller unit would show 1,000 of it."""

_LARGEST_WRITTEN_OUT = 1e15
"""Beyond it floats have no decimals, and a damaged file could fill a screen with digits."""


def number(value: float | None, digits: int = 3) -> str:
    """A plain number; digits before the decimal point are always shown.

    >>> number(2.1466), number(49668.2), number(0.000312), number(0), number(None)
    ('2.15', '49,668', '0.00031', '0.00', '–')
    >>> number(2.1466, digits=4), number(312.43, digits=4), number(1e300), number(float("nan"))
    ('2.147', '312.4', '1e+300', 'nan')
    """
    if value is None:
        return UNKNOWN
    size = abs(value)
    if 0 < size < 0.1:
        return f"{value:.{digits - 1}g}"
    if size >= _LARGEST_WRITTEN_OUT:
        return f"{value:.{digits}g}"
    decimals = digits - (1 if size < 10 else 2 if size < 100 else 3)
    return f"{value:,.{decimals if size < 1000 and decimals > 0 else 0}f}"


def count(value: float | None, digits: int = 3) -> str:
    """How many: parameters, tokens, tokens per second.

    >>> count(7_391_744), count(1_339_000_000), count(182_345), count(950), count(9.5), count(999_999)
    ('7.39M', '1.34B', '182k', '950', '9.5', '1M')
    """
    if value is None:
        return UNKNOWN
    unit, prefix = _prefix(value, _COUNT_PREFIXES)
    scaled = value / unit
    return (f"{scaled:.{digits}g}" if abs(scaled) < 1000 else f"{scaled:,.0f}") + prefix


def flops(value: float | None) -> str:
    """Floating-point operations, with the one decimal that datasheets have.

    >>> flops(989.4e12), flops(61.34e9), flops(1.2e21), flops(12)
    ('989.4 TFLOP', '61.3 GFLOP', '1.2 ZFLOP', '12 FLOP')
    """
    if value is None:
        return UNKNOWN
    unit, prefix = flop_prefix(value)
    return f"{value / unit:.1f} {prefix}FLOP" if prefix else f"{value:.0f} FLOP"


def flop_prefix(value: float) -> tuple[float, str]:
    """The unit that fits a number of FLOPs, for a table with one unit.

    >>> flop_prefix(61.34e9)
    (1000000000.0, 'G')
    """
    return _prefix(value, _FLOP_PREFIXES)


def flop_rate(flops_per_s: float | None) -> str:
    """FLOP/s, such as a peak.

    >>> flop_rate(989.4e12)
    '989.4 TFLOP/s'
    """
    return UNKNOWN if flops_per_s is None else f"{flops(flops_per_s)}/s"


def byte_size(size: float | None, digits: int = 3) -> str:
    """Memory in binary units.

    >>> byte_size(3 * 2**30), byte_size(700 * 2**20), byte_size(512), byte_size(None)
    ('3.00 GiB', '700 MiB', '512 B', '–')
    """
    if size is None:
        return UNKNOWN
    unit, prefix = _prefix(size, _BINARY_PREFIXES)
    return f"{number(size / unit, digits)} {prefix}B" if prefix else f"{size:.0f} B"


def step_time(seconds: float | None, digits: int = 3) -> str:
    """Time of one step, in milliseconds below a second.

    >>> step_time(0.32649), step_time(2.5), step_time(0.00042), step_time(200)
    ('326 ms', '2.50 s', '0.42 ms', '200 s')
    """
    if seconds is None:
        return UNKNOWN
    return f"{number(seconds, digits)} s" if seconds >= 1 else f"{number(1e3 * seconds, digits)} ms"


def duration(seconds: float | None, *, rough: bool = False) -> str:
    """How long something took, in two units at most.

    Args:
        seconds: Its length.
        rough: Leave out the seconds beside minutes, for estimates and for times that grow while one looks at them.

    >>> duration(0.0123), duration(4.24), duration(42.4), duration(200), duration(3840), duration(200_000)
    ('12 ms', '4.2 s', '42 s', '3 min 20 s', '1 h 04 min', '2 d 8 h')
    >>> duration(200, rough=True), duration(42.4, rough=True)
    ('3 min', '42 s')
    """
    if seconds is None:
        return UNKNOWN
    if not isfinite(seconds):
        return f"{seconds} s"
    if seconds < 1:
        return f"{number(1e3 * seconds, digits=2)} ms"
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    if round(seconds) < 3600 and not rough:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes < 48 * 60 else f"{hours // 24} d {hours % 24} h"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share of 1 in percent; below 1 % two digits, so that little is not shown as nothing.

    >>> percent(0.4127), percent(1.0), percent(0.00042), percent(0.0), percent(None)
    ('41.3 %', '100 %', '0.042 %', '0 %', '–')
    >>> percent(0.41273, decimals=2)
    '41.27 %'
    """
    if share is None:
        return UNKNOWN
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2g} %" if abs(share) < 0.01 else f"{100 * share:.{decimals}f} %"


def factor(value: float | None, digits: int = 3) -> str:
    """How many times as much.

    >>> factor(2.456), factor(0.93456, digits=4), factor(None)
    ('2.46×', '0.935×', '–')
    """
    return UNKNOWN if value is None else f"{number(value, digits)}×"


def plural(amount: int, word: str) -> str:
    """An amount with its word.

    >>> plural(1, "trial"), plural(3000, "trial")
    ('1 trial', '3,000 trials')
    """
    return f"{amount:,} {word}" if amount == 1 else f"{amount:,} {word}s"


def _prefix(value: float, prefixes: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next(((unit, prefix) for unit, prefix in prefixes if abs(value) >= _ROUNDS_UP * unit), (1.0, ""))
