"""The comparison of two sweeps as a document: what differs, the ratios, and the changed outcomes."""

from collections.abc import Iterator, Sequence
from itertools import product

from flopwatch.numbers import UNKNOWN, factor, number
from flopwatch.present import document as doc
from flopwatch.report.comparison import QUANTITIES, Pair, Quantity, Side, SweepComparison
from flopwatch.stats import NO_DIFFERENCE, TOO_FEW
from flopwatch.text import listed, plural

TITLES: dict[Quantity, str] = {"time": "time", "samples_per_s": "samples/s", "memory": "memory", "mfu": "MFU"}
_BETTER: dict[Quantity, str] = {"time": "faster", "samples_per_s": "faster", "memory": "less", "mfu": "higher"}
_WORSE: dict[Quantity, str] = {"time": "slower", "samples_per_s": "slower", "memory": "more", "mfu": "lower"}
_MARKS = {NO_DIFFERENCE: "≈", TOO_FEW: "?"}
_TONES: dict[str, doc.Tone] = {"better": "better", "worse": "worse"}
_MOST_PAIRS = doc.Most(30, 100, 1000)
_MOST_NAMES = 10
HOW_DECIDED = (
    "Ratios are B / A. B is called faster or slower only if the 95 % intervals of the median step times do not overlap "
    "after each was widened by 2 %, because two processes that run the same trial differ by that much. Memory is "
    "called more or less if it differs by more than 1 %. ≈ means no measurable difference. ? means that there "
    "are fewer than 6 steps, or fewer than 3 runs of a repeated trial, which is too few for an interval. Among many "
    "pairs, a few differ by chance: repeat the sweep before you rely on a single pair."
)


def comparison_document(comparison: SweepComparison) -> doc.Document:
    have_all = dict.fromkeys(doc.EVERYWHERE, "--json has all")
    return doc.Document("Two sweeps compared", list(_parts(comparison)), have_all=have_all)


def _parts(comparison: SweepComparison) -> Iterator[doc.Part]:
    sides = (("A", comparison.a), ("B", comparison.b))
    yield doc.Facts([(name, f"{side_text(side)}, in {side.folder}") for name, side in sides])
    yield from (doc.Text(f"{note[:1].upper()}{note[1:]}.", "warn") for note in comparison.notes)
    if differing := (*comparison.settings, *comparison.environment):
        warning = doc.Text("The compared trials differ in these, so compare with care.")
        table = doc.Table(("", "A", "B"), [(one.what, one.a or UNKNOWN, one.b or UNKNOWN) for one in differing])
        yield doc.Section("Differences between the sweeps", [warning, table])
    elif comparison.pairs and not any(pair.differences for pair in comparison.pairs):
        yield doc.Text("The compared trials have the same settings, versions, devices and hosts.")
    if comparison.overall:
        yield _overall(comparison)
        yield _pairs(comparison)
    if changes := list(_changes(comparison.pairs)):
        yield doc.Section("Changed outcomes", changes)
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
    cells = []
    for (trainer, overall), quantity in product(rows, shown_quantities(comparison)):
        if found := overall.get(quantity):
            told = f"{found.better:,} {_BETTER[quantity]}, {found.worse:,} {_WORSE[quantity]}"
            told += f", {found.undecided:,} without a measurable difference"
            cells.append((trainer, TITLES[quantity], factor(found.mean_ratio, digits=4), told))
    mean = doc.Column("geometric mean", is_number=True, short="mean")
    said = doc.Text(f"{ran:,} of {len(comparison.pairs):,} pairs ran to their end in both sweeps.")
    return doc.Section("B / A", [said, doc.Table(["trainer", "", mean, "pairs"], cells, most=doc.Most(40, 60, 200))])


def _pairs(comparison: SweepComparison) -> doc.Section:
    """The trials: all in their order, or those with the largest differences if a medium cannot show all."""
    known = [pair for pair in comparison.pairs if pair.ratios]
    shown, places = shown_quantities(comparison), range(len(known))
    telling = sorted(places, key=lambda place: _telling(known[place]), reverse=True)
    own = ["; ".join(f"{d.what} {d.a or UNKNOWN} → {d.b or UNKNOWN}" for d in pair.differences) for pair in known]
    columns: list[doc.Column | str] = ["trial"]
    for quantity in shown:
        columns += [doc.Column(word, is_number=True, group=TITLES[quantity]) for word in ("B / A", "verdict")]
    columns += ["differs in"] if any(own) else []
    rows = [
        [pair.trial, *_ratio_cells(pair, shown), said][: len(columns)] for pair, said in zip(known, own, strict=True)
    ]
    table = doc.Table(
        columns, rows, most=_MOST_PAIRS, pick=lambda _, most: telling[:most], picked="the largest differences"
    )
    return doc.Section("Trials", [table])


def _telling(pair: Pair) -> tuple[bool, float]:
    ratio = pair.ratios.get("time") or next(iter(pair.ratios.values()))
    is_decided = any(one.verdict in _TONES for one in pair.ratios.values())
    return is_decided, max(ratio.ratio, 1 / ratio.ratio)


def _ratio_cells(pair: Pair, shown: Sequence[Quantity]) -> Iterator[doc.Cell | str]:
    for quantity in shown:
        ratio = pair.ratios.get(quantity)
        if ratio is None:
            yield from (UNKNOWN, "")
            continue
        value, between = factor(ratio.ratio, digits=4), ""
        if ratio.low is not None and ratio.high is not None:
            between = f"{number(ratio.low, digits=4)} to {number(ratio.high, digits=4)}"
        # A terminal has room for one interval; those of samples/s and MFU follow from that of the time.
        short = f"{value} {between}" if quantity == shown[0] else value
        yield doc.Cell(f"{value} ({between})" if between else value, short=short)
        unstable = "~" if pair.is_unstable and quantity != "memory" else ""
        said = {"better": _BETTER[quantity], "worse": _WORSE[quantity]}.get(ratio.verdict, ratio.verdict)
        mark = _MARKS.get(ratio.verdict, said)
        yield doc.Cell(said, _TONES.get(ratio.verdict, ""), unstable, short=f"{mark} {unstable}")


def _changes(all_pairs: Sequence[Pair]) -> Iterator[doc.Section]:
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in all_pairs:
        if pair.outcome_a != pair.outcome_b:
            found.setdefault((pair.outcome_a, pair.outcome_b), []).append(pair)
    ordered = sorted(found.items(), key=lambda one: (one[0][0] != "ok", one[0][1] != "ok", -len(one[1])))
    for (before, after), pairs in ordered:
        tone: doc.Tone = "worse" if before == "ok" else "better" if after == "ok" else ""
        said = [": ".join(filter(None, (pair.trial, pair.reason_b or pair.reason_a))) for pair in pairs]
        lead = [doc.Cell(f"{before} → {after}", tone)]
        yield doc.Section(plural(len(pairs), "trial"), [doc.Items(said, most=doc.Most(5, 10, 50))], lead=lead)
