"""Formats numbers for screens, log lines and reports, with one function per quantity. Standard library only.

An unknown value (None) becomes a dash. `digits` is the number of significant digits. A value other than 0 is never
written as 0.
"""

from collections.abc import Sequence
from math import isfinite

UNKNOWN = "–"
_FLOP_PREFIXES = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNT_PREFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""The prefix for 1e9 is B, because the sizes of models and datasets are given in billions."""
_BINARY_PREFIXES = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
_ROUNDS_UP = 0.9995
"""A value of at least this fraction of a unit is shown in that unit: 999,999 as 1M instead of 1,000k."""

_LARGEST_WRITTEN_OUT = 1e15
"""Larger numbers are written with an exponent, because a value from a damaged file could have 300 digits."""


def number(value: float | None, digits: int = 3) -> str:
    """A number without a unit. All digits before the decimal point are shown.

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
    """A count, such as parameters or tokens per second.

    >>> count(7_391_744), count(1_339_000_000), count(182_345), count(950), count(9.5), count(999_999)
    ('7.39M', '1.34B', '182k', '950', '9.5', '1M')
    """
    if value is None:
        return UNKNOWN
    unit, prefix = _prefix(value, _COUNT_PREFIXES)
    scaled = value / unit
    return (f"{scaled:.{digits}g}" if abs(scaled) < 1000 else f"{scaled:,.0f}") + prefix


def flops(value: float | None) -> str:
    """Floating-point operations with one decimal, as in datasheets.

    >>> flops(989.4e12), flops(61.34e9), flops(1.2e21), flops(12)
    ('989.4 TFLOP', '61.3 GFLOP', '1.2 ZFLOP', '12 FLOP')
    """
    if value is None:
        return UNKNOWN
    unit, prefix = flop_prefix(value)
    return f"{value / unit:.1f} {prefix}FLOP" if prefix else f"{value:.0f} FLOP"


def flop_prefix(value: float) -> tuple[float, str]:
    """The factor and the prefix of the unit that suits a number of FLOPs, for a table that uses one unit.

    >>> flop_prefix(61.34e9)
    (1000000000.0, 'G')
    """
    return _prefix(value, _FLOP_PREFIXES)


def flop_rate(flops_per_s: float | None) -> str:
    """Write a rate in FLOP/s, such as a device's peak.

    >>> flop_rate(989.4e12)
    '989.4 TFLOP/s'
    """
    return UNKNOWN if flops_per_s is None else f"{flops(flops_per_s)}/s"


def byte_size(size: float | None, digits: int = 3) -> str:
    """Write an amount of memory in binary units.

    >>> byte_size(3 * 2**30), byte_size(700 * 2**20), byte_size(512), byte_size(None)
    ('3.00 GiB', '700 MiB', '512 B', '–')
    """
    if size is None:
        return UNKNOWN
    unit, prefix = _prefix(size, _BINARY_PREFIXES)
    return f"{number(size / unit, digits)} {prefix}B" if prefix else f"{size:.0f} B"


def energy(joules: float | None, digits: int = 3) -> str:
    """An amount of energy.

    >>> energy(4080.0), energy(0.0769), energy(3.6e6), energy(0.00012)
    ('4.08 kJ', '76.9 mJ', '3.60 MJ', '0.12 mJ')
    """
    if joules is None:
        return UNKNOWN
    if 0 < abs(joules) < _ROUNDS_UP:
        return f"{number(1e3 * joules, digits)} mJ"
    unit, prefix = _prefix(joules, _FLOP_PREFIXES)
    return f"{number(joules / unit, digits)} {prefix}J"


def step_time(seconds: float | None, digits: int = 3) -> str:
    """Time of one step, in milliseconds below a second.

    >>> step_time(0.32649), step_time(2.5), step_time(0.00042), step_time(200)
    ('326 ms', '2.50 s', '0.42 ms', '200 s')
    """
    if seconds is None:
        return UNKNOWN
    return f"{number(seconds, digits)} s" if seconds >= 1 else f"{number(1e3 * seconds, digits)} ms"


def duration(seconds: float | None, *, rough: bool = False) -> str:
    """A duration in at most two units; `rough` shows minutes without seconds, as for estimates.

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
    """A fraction as a percentage; below 1 %, with two significant digits.

    >>> percent(0.4127), percent(1.0), percent(0.00042), percent(0.0), percent(None)
    ('41.3 %', '100 %', '0.042 %', '0 %', '–')
    >>> percent(0.41273, decimals=2), percent(0.00997)
    ('41.27 %', '1.0 %')
    """
    if share is None:
        return UNKNOWN
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    short = f"{100 * share:.2g}"
    # 0.997 % rounds to 1, which has its decimals like every share from 1 % on.
    return f"{short} %" if abs(float(short)) < 1 else f"{100 * share:.{decimals}f} %"


def _prefix(value: float, prefixes: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next(((unit, prefix) for unit, prefix in prefixes if abs(value) >= _ROUNDS_UP * unit), (1.0, ""))
