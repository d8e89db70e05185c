"""Numbers and times as people read them on a small screen."""


def short_number(value: float) -> str:
    """Four digits or so, as long as the number stays readable without a prefix.

    >>> short_number(2.14659), short_number(49668.2), short_number(0.000312), short_number(1234567.0)
    ('2.147', '49,668', '0.000312', '1,234,567')
    """
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.1 or size == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Two units at most.

    >>> duration(0.0123), duration(42.4), duration(3840), duration(200_000)
    ('12 ms', '42 s', '1 h 04 min', '2 d 8 h')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def step_seconds(seconds: float) -> str:
    """Of a step: milliseconds below a second.

    >>> step_seconds(0.32649), step_seconds(2.5), step_seconds(0.00042)
    ('326.5 ms', '2.500 s', '0.420 ms')
    """
    if seconds >= 1:
        return f"{short_number(seconds)} s"
    return f"{short_number(1e3 * seconds)} ms"


def flop_rate(flops_per_s: float) -> str:
    """With a prefix.

    >>> flop_rate(989.4e12), flop_rate(61.3e9)
    ('989.4 TFLOP/s', '61.3 GFLOP/s')
    """
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops_per_s >= factor:
            return f"{flops_per_s / factor:.1f} {prefix}FLOP/s"
    return f"{flops_per_s:.0f} FLOP/s"


def percent(share_percent: float) -> str:
    """One decimal; what is too small for it is not shown as nothing.

    >>> percent(41.27), percent(0.04), percent(0.0)
    ('41.3 %', '< 0.1 %', '0 %')
    """
    if share_percent == 0:
        return "0 %"
    return f"{share_percent:.1f} %" if share_percent >= 0.1 else "< 0.1 %"


def scaled_number(value: float) -> tuple[str, str]:
    """Digits and prefix.

    >>> scaled_number(49668.2), scaled_number(1234567.0), scaled_number(3.2)
    (('49,668', ''), ('1.235', 'M'), ('3.200', ''))
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return short_number(value / factor), prefix
    return short_number(value), ""


def bytes_text(size: float) -> str:
    """With a binary prefix.

    >>> bytes_text(512 * 2**20), bytes_text(3.25 * 2**30)
    ('512 MiB', '3.25 GiB')
    """
    if size >= 2**30:
        return f"{size / 2**30:.3g} GiB"
    return f"{size / 2**20:.3g} MiB" if size < 2**20 * 999 else f"{size / 2**30:.3g} GiB"


def count_text(count: float) -> str:
    """A large count with a prefix.

    >>> count_text(7_391_744), count_text(1_339_000_000)
    ('7.39M', '1.34B')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{prefix}"
    return f"{count:g}"


def plural(count: int, word: str) -> str:
    """Count and word.

    >>> plural(1, "trial"), plural(3, "trial")
    ('1 trial', '3 trials')
    """
    return f"{count} {word}" if count == 1 else f"{count:,} {word}s"
