"""The comparison of two sweeps as a document: what differs, the ratios, and the changed outcomes."""

from collections.abc import Iterator, Sequence

from flopwatch.numbers import UNKNOWN, factor
from flopwatch.present import document as doc
from flopwatch.report.comparison.ratios import (
    QUANTITIES,
    Overall,
    Pair,
    Quantity,
    Ratio,
    Side,
    SweepComparison,
)
from flopwatch.stats import NO_DIFFERENCE, TOO_FEW
from flopwatch.text import listed, plural

TITLES: dict[Quantity, str] = {"time": "time", "samples_per_s": "samples/s", "memory": "memory", "mfu": "MFU"}
_WORDS: dict[Quantity, dict[str, str]] = {
    "time": {"better": "faster", "worse": "slower"},
    "samples_per_s": {"better": "faster", "worse": "slower"},
    "memory": {"better": "less", "worse": "more"},
    "mfu": {"better": "higher", "worse": "lower"},
}
_MARKS = {NO_DIFFERENCE: "≈", TOO_FEW: "?"}
_TONES: dict[str, doc.Tone] = {"better": "better", "worse": "worse"}
_MOST_PAIRS = doc.Most(30, 100, 1000)
_MOST_NAMES = 10
HOW_DECIDED = (
    "Ratios are B / A. B is called faster or slower only if the 95 % intervals of the median step times do not overlap "
    "after each was widened by 2 %, because two processes that run the same trial differ by that much. Memory is "
    "called more or less if it differs by more than 1 %. ≈ means no measurable difference. ? means that fewer than 6 "
    "steps were measured, which is too few for an interval. Among many pairs, a few differ by chance: repeat the sweep "
    "before you rely on a single pair."
)


def comparison_document(comparison: SweepComparison) -> doc.Document:
    return doc.Document(
        "Two sweeps compared",
        list(_parts(comparison)),
        have_all=dict.fromkeys(doc.EVERYWHERE, "--json has all"),
    )


def _parts(comparison: SweepComparison) -> Iterator[doc.Part]:
    sides = (("A", comparison.a), ("B", comparison.b))
    yield doc.Facts([(name, f"{side_text(side)}, in {side.folder}") for name, side in sides])
    yield from (doc.Text(f"{note[:1].upper()}{note[1:]}.", "warn") for note in comparison.notes)
    differences = [
        (one.what, one.a or UNKNOWN, one.b or UNKNOWN) for one in (*comparison.settings, *comparison.environment)
    ]
    if differences:
        warning = doc.Text("The sweeps differ in these, so compare with care.")
        table = doc.Table(("", "A", "B"), differences)
        yield doc.Section("Differences between the sweeps", [warning, table])
    else:
        yield doc.Text("Both sweeps have the same settings, versions, devices and hosts.")
    if comparison.overall:
        yield _overall(comparison)
        yield _pairs(comparison)
    if changes := outcome_changes(comparison):
        yield doc.Section("Changed outcomes", [_change(*change) for change in changes])
    for name, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            yield doc.Text(f"Only in {name}, {len(names):,}: {listed(list(names), _MOST_NAMES)}")
    if comparison.overall:
        yield doc.Text(HOW_DECIDED, "note")


def side_text(side: Side) -> str:
    """Write the number of trials by outcome.

    >>> side_text(Side("x", 3, {"ok": 2, "oom_device": 1}))
    '3 trials: 2 ok, 1 oom_device'
    """
    counts = sorted(side.by_outcome.items(), key=lambda one: (one[0] != "ok", -one[1], one[0]))
    by_outcome = ", ".join(f"{amount:,} {word}" for word, amount in counts)
    return plural(side.trials, "trial") + (f": {by_outcome}" if counts else "")


def shown_quantities(comparison: SweepComparison) -> list[Quantity]:
    """Return the quantities to show. If all pairs have step times, samples per second are left out as redundant."""
    known = [quantity for quantity in QUANTITIES if quantity in comparison.overall]
    has_rate_alone = any("samples_per_s" in pair.ratios and "time" not in pair.ratios for pair in comparison.pairs)
    return [quantity for quantity in known if quantity != "samples_per_s" or has_rate_alone]


def _overall(comparison: SweepComparison) -> doc.Section:
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    rows = [("all", comparison.overall)]
    rows += comparison.by_trainer.items() if len(comparison.by_trainer) > 1 else []
    cells = [
        (trainer, TITLES[quantity], ratio_text(found[quantity].mean_ratio), overall_text(quantity, found[quantity]))
        for trainer, found in rows
        for quantity in shown_quantities(comparison)
        if quantity in found
    ]
    said = f"{ran:,} of {len(comparison.pairs):,} pairs ran to their end in both sweeps."
    columns: tuple[doc.Column | str, ...] = (
        "trainer",
        "",
        doc.Column("geometric mean", is_number=True, short="mean"),
        "pairs",
    )
    return doc.Section("B / A", [doc.Text(said), doc.Table(columns, cells, most=doc.Most(40, 60, 200))])


def overall_text(quantity: Quantity, found: Overall) -> str:
    better, worse = _WORDS[quantity]["better"], _WORDS[quantity]["worse"]
    return f"{found.better:,} {better}, {found.worse:,} {worse}, {found.undecided:,} without a measurable difference"


def _pairs(comparison: SweepComparison) -> doc.Section:
    """The trials: all in their order, or those with the largest differences if a medium cannot show all."""
    known = [pair for pair in comparison.pairs if pair.ratios]
    shown, places = shown_quantities(comparison), range(len(known))
    telling = sorted(places, key=lambda place: _telling(known[place]), reverse=True)
    has_own = any(pair.differences for pair in known)
    columns: list[doc.Column | str] = ["trial"]
    for quantity in shown:
        columns += [doc.Column(word, is_number=True, group=TITLES[quantity]) for word in ("B / A", "verdict")]
    columns += ["differs in"] if has_own else []
    rows = [[pair.trial, *_ratio_cells(pair, shown), *([_own(pair)] if has_own else [])] for pair in known]
    table = doc.Table(
        columns, rows, most=_MOST_PAIRS, pick=lambda _, most: telling[:most], picked="the largest differences"
    )
    return doc.Section("Trials", [table])


def _telling(pair: Pair) -> tuple[bool, float]:
    ratio = pair.ratios.get("time") or next(iter(pair.ratios.values()))
    is_decided = any(one.verdict in _TONES for one in pair.ratios.values())
    return is_decided, max(ratio.ratio, 1 / ratio.ratio)


def _own(pair: Pair) -> str:
    return "; ".join(f"{one.what} {one.a or UNKNOWN} → {one.b or UNKNOWN}" for one in pair.differences)


def _ratio_cells(pair: Pair, shown: Sequence[Quantity]) -> Iterator[doc.Cell | str]:
    for quantity in shown:
        ratio = pair.ratios.get(quantity)
        if ratio is None:
            yield from (UNKNOWN, "")
            continue
        between = interval_text(ratio)
        value, interval = ratio_text(ratio.ratio), f" ({between})" if between else ""
        # A terminal has room for one interval; those of samples/s and MFU follow from that of the time.
        yield doc.Cell(f"{value}{interval}", short=f"{value} {between}" if quantity == shown[0] else value)
        unstable = "~" if pair.is_unstable and quantity != "memory" else ""
        said = _WORDS[quantity].get(ratio.verdict, ratio.verdict)
        mark = _MARKS.get(ratio.verdict, said)
        yield doc.Cell(said, _TONES.get(ratio.verdict, ""), unstable, short=f"{mark} {unstable}")


def ratio_text(value: float | None) -> str:
    """Write a ratio with up to four digits, because near 1 the third decimal matters.

    >>> ratio_text(0.93456), ratio_text(2.456), ratio_text(None)
    ('0.935×', '2.456×', '–')
    """
    return factor(value, digits=4)


def interval_text(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f"{ratio_text(ratio.low).rstrip('×')} to {ratio_text(ratio.high).rstrip('×')}"


def outcome_changes(comparison: SweepComparison) -> list[tuple[str, str, list[Pair]]]:
    """Group pairs with different outcomes by (outcome in A, outcome in B). Those that are `ok` only in A come first."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in comparison.changed_outcomes:
        found.setdefault((pair.outcome_a, pair.outcome_b), []).append(pair)
    ordered = sorted(found.items(), key=lambda one: (one[0][0] != "ok", one[0][1] != "ok", -len(one[1])))
    return [(*outcomes, pairs) for outcomes, pairs in ordered]


def _change(before: str, after: str, pairs: Sequence[Pair]) -> doc.Section:
    tone: doc.Tone = "worse" if before == "ok" else "better" if after == "ok" else ""
    reasons = [pair.reason_b or pair.reason_a for pair in pairs]
    said = [f"{pair.trial}: {reason}" if reason else pair.trial for pair, reason in zip(pairs, reasons, strict=True)]
    lead = [doc.Cell(f"{before} → {after}", tone)]
    return doc.Section(plural(len(pairs), "trial"), [doc.Items(said, most=doc.Most(5, 10, 50))], lead=lead)
