"""A comparison in words and figures that the terminal and Markdown share."""

from collections import Counter
from collections.abc import Sequence

from flopwatch.report.figures import UNKNOWN
from flopwatch.sweep_comparison.ratios import QUANTITIES
from flopwatch.sweep_comparison.records import Overall, Pair, Quantity, Ratio, Side, SweepComparison, Verdict

TITLES: dict[Quantity, str] = {"time": "time", "samples_per_s": "samples/s", "memory": "memory", "mfu": "MFU"}
_WORDS: dict[Quantity, dict[Verdict, str]] = {
    "time": {"better": "faster", "worse": "slower"},
    "samples_per_s": {"better": "faster", "worse": "slower"},
    "memory": {"better": "less", "worse": "more"},
    "mfu": {"better": "higher", "worse": "lower"},
}
HOW_DECIDED = (
    "Ratios are B / A. Faster and slower are said where the 95 % intervals of the medians, each 2 % wider because two "
    "processes that run the same differ by so much, do not overlap; more and less memory from 1 % on; otherwise ≈, not "
    "told apart, or ? where fewer than 6 steps were measured, which have no interval. Of many pairs a few are chance: "
    "repeat the sweep before you believe a single one."
)


def shown_quantities(comparison: SweepComparison) -> list[Quantity]:
    """Samples per second only where times are missing: else they say the same."""
    known = [quantity for quantity in QUANTITIES if quantity in comparison.overall]
    has_rate_alone = any("samples_per_s" in pair.ratios and "time" not in pair.ratios for pair in comparison.pairs)
    return [quantity for quantity in known if quantity != "samples_per_s" or has_rate_alone]


def ratio_text(value: float | None) -> str:
    """Three decimals near 1, where they matter.

    >>> ratio_text(0.93456), ratio_text(2.456), ratio_text(31.4159), ratio_text(1234567.0), ratio_text(None)
    ('0.935×', '2.46×', '31.4×', '1.23e+06×', '–')
    """
    if value is None:
        return UNKNOWN
    return f"{value:.3f}×" if 0.1 <= value < 2 else f"{value:#.3g}×" if 0.01 <= value < 1000 else f"{value:.3g}×"


def interval_text(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f"{ratio_text(ratio.low).rstrip('×')} to {ratio_text(ratio.high).rstrip('×')}"


def verdict_word(quantity: Quantity, verdict: Verdict) -> str:
    """One or two words.

    >>> verdict_word("memory", "better"), verdict_word("time", "not told apart")
    ('less', 'not told apart')
    """
    return _WORDS[quantity].get(verdict, verdict)


def verdict_mark(quantity: Quantity, verdict: Verdict) -> str:
    """For a narrow cell: ≈ is not told apart, ? has too few steps to tell.

    >>> verdict_mark("mfu", "worse"), verdict_mark("time", "not told apart")
    ('lower', '≈')
    """
    return {"not told apart": "≈", "too few steps": "?"}.get(verdict) or verdict_word(quantity, verdict)


def unstable_mark(quantity: Quantity, pair: Pair) -> str:
    return " ~" if pair.is_unstable and quantity != "memory" else ""


def side_text(side: Side) -> str:
    """Counts by outcome.

    >>> side_text(Side("x", 3, {"ok": 2, "oom_device": 1}))
    '3 trials: 2 ok, 1 oom_device'
    """
    counts = sorted(side.by_outcome.items(), key=lambda one: (one[0] != "ok", -one[1], one[0]))
    return f"{side.trials:,} trials" + (
        f": {', '.join(f'{count:,} {word}' for word, count in counts)}" if counts else ""
    )


def overall_text(quantity: Quantity, found: Overall) -> str:
    better, worse = verdict_word(quantity, "better"), verdict_word(quantity, "worse")
    return f"{found.better:,} {better}, {found.worse:,} {worse}, {found.undecided:,} not told apart"


def outcome_changes(comparison: SweepComparison) -> list[tuple[str, str, list[Pair]]]:
    """From, to, and the pairs; what no longer runs first, then the most."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in comparison.changed_outcomes:
        found.setdefault((pair.outcome_a, pair.outcome_b), []).append(pair)
    ordered = sorted(found.items(), key=lambda one: (one[0][0] != "ok", one[0][1] != "ok", -len(one[1])))
    return [(*outcomes, pairs) for outcomes, pairs in ordered]


def most_telling(pairs: Sequence[Pair], at_most: int) -> list[Pair]:
    """Those with ratios: the decided ones first, then the largest change of time, else of memory."""
    known = [pair for pair in pairs if pair.ratios]
    if len(known) <= at_most:
        return known
    return sorted(known, key=_telling, reverse=True)[:at_most]


def _telling(pair: Pair) -> tuple[bool, float]:
    ratio = pair.ratios.get("time") or next(iter(pair.ratios.values()))
    decided = Counter(one.verdict in ("better", "worse") for one in pair.ratios.values())[True]
    return decided > 0, max(ratio.ratio, 1 / ratio.ratio)
