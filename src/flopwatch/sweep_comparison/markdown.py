"""A comparison as Markdown that can be pasted into a GitHub issue or pull request."""

from collections.abc import Iterable, Iterator, Sequence

from flopwatch.report.figures import UNKNOWN
from flopwatch.report.markdown import escaped
from flopwatch.sweep_comparison.records import Difference, Pair, Quantity, SweepComparison, Verdict
from flopwatch.sweep_comparison.words import (
    HOW_DECIDED,
    TITLES,
    interval_text,
    most_telling,
    outcome_changes,
    overall_text,
    ratio_text,
    shown_quantities,
    side_text,
    unstable_mark,
    verdict_word,
)

MOST_PAIRS = 100
MOST_NAMES = 10


def comparison_markdown(comparison: SweepComparison) -> str:
    """Headings and tables; nothing of it is taken for markup that came from a trial."""
    return "\n".join(_lines(comparison)).rstrip() + "\n"


def _lines(comparison: SweepComparison) -> Iterator[str]:
    yield "## Two sweeps compared\n"
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        yield f"- **{name}** {escaped(side.folder)}, {escaped(side_text(side))}"
    yield ""
    yield from (f"> **Note:** {escaped(note)}\n" for note in comparison.notes)
    yield from _differences((*comparison.settings, *comparison.environment))
    yield from _overall(comparison)
    yield from _pairs(comparison)
    yield from _outcomes(comparison)
    for name, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            yield f"**Only in {name}** ({len(names):,}): {_named(names)}\n"


def _differences(differences: Sequence[Difference]) -> Iterator[str]:
    if not differences:
        return
    yield "### Not the same in both\n"
    rows = ((one.what, one.a or UNKNOWN, one.b or UNKNOWN) for one in differences)
    yield from _table(("", "A", "B"), (tuple(map(escaped, row)) for row in rows), 3)


def _overall(comparison: SweepComparison) -> Iterator[str]:
    if not comparison.overall:
        return
    yield "### B / A\n"
    shown = shown_quantities(comparison)
    rows = [("all", comparison.overall)]
    rows += comparison.by_trainer.items() if len(comparison.by_trainer) > 1 else []
    cells = (
        (
            escaped(trainer),
            TITLES[quantity],
            ratio_text(found[quantity].mean_ratio),
            overall_text(quantity, found[quantity]),
        )
        for trainer, found in rows
        for quantity in shown
        if quantity in found
    )
    yield from _table(("trainer", "", "geometric mean", "pairs"), cells, 2)


def _pairs(comparison: SweepComparison) -> Iterator[str]:
    pairs, shown = most_telling(comparison.pairs, MOST_PAIRS), shown_quantities(comparison)
    if not pairs:
        return
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    yield f"### Trials{'' if ran == len(pairs) else f' ({len(pairs)} of {ran:,}, the largest differences)'}\n"
    head = ("trial", *(word for quantity in shown for word in (TITLES[quantity], "")))
    yield from _table(head, (_pair_cells(pair, shown) for pair in pairs), 1)
    yield f"<sub>{HOW_DECIDED}</sub>\n"


def _pair_cells(pair: Pair, shown: Sequence[Quantity]) -> tuple[str, ...]:
    return (escaped(pair.trial), *(cell for quantity in shown for cell in _ratio_cells(pair, quantity)))


def _ratio_cells(pair: Pair, quantity: Quantity) -> tuple[str, str]:
    ratio = pair.ratios.get(quantity)
    if ratio is None:
        return UNKNOWN, ""
    interval = f" ({interval_text(ratio)})" if ratio.low is not None else ""
    return ratio_text(ratio.ratio) + interval, _emphasised(quantity, ratio.verdict) + unstable_mark(quantity, pair)


def _emphasised(quantity: Quantity, verdict: Verdict) -> str:
    word = verdict_word(quantity, verdict)
    return f"**{word}**" if verdict in ("better", "worse") else word


def _outcomes(comparison: SweepComparison) -> Iterator[str]:
    changes = outcome_changes(comparison)
    if changes:
        yield "### Ended in another way\n"
        for before, after, pairs in changes:
            yield f"- {escaped(before)} → {escaped(after)}, {len(pairs):,}: {_named([pair.trial for pair in pairs])}"
        yield ""


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(escaped(name) for name in names[:MOST_NAMES]) + more


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join(':--' if place < left else '--:' for place in range(len(head)))} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
