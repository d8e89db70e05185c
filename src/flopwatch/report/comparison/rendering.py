"""Write the comparison of two sweeps as text for the terminal, as Markdown for a pull request, or as JSON.

The text does not use rich, because rich would interpret square brackets in messages of trials as markup.
"""

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

import click

from flopwatch.numbers import UNKNOWN, factor
from flopwatch.present.markdown import escaped
from flopwatch.report.comparison.ratios import (
    QUANTITIES,
    Difference,
    Overall,
    Pair,
    Quantity,
    Ratio,
    Side,
    SweepComparison,
    Verdict,
)
from flopwatch.report.exports import json_document, markdown_table, record_fields
from flopwatch.text import listed, one_line, plural

TITLES: dict[Quantity, str] = {"time": "time", "samples_per_s": "samples/s", "memory": "memory", "mfu": "MFU"}
_WORDS: dict[Quantity, dict[Verdict, str]] = {
    "time": {"better": "faster", "worse": "slower"},
    "samples_per_s": {"better": "faster", "worse": "slower"},
    "memory": {"better": "less", "worse": "more"},
    "mfu": {"better": "higher", "worse": "lower"},
}
HOW_DECIDED = (
    "Ratios are B / A. B is called faster or slower only if the 95 % intervals of the median step times do not overlap "
    "after each was widened by 2 %, because two processes that run the same trial differ by that much. Memory is "
    "called more or less if it differs by more than 1 %. ≈ means no measurable difference. ? means that fewer than 6 "
    "steps were measured, which is too few for an interval. Among many pairs, a few differ by chance: repeat the sweep "
    "before you rely on a single pair."
)


def shown_quantities(comparison: SweepComparison) -> list[Quantity]:
    """Return the quantities to show. If all pairs have step times, samples per second are left out as redundant."""
    known = [quantity for quantity in QUANTITIES if quantity in comparison.overall]
    has_rate_alone = any("samples_per_s" in pair.ratios and "time" not in pair.ratios for pair in comparison.pairs)
    return [quantity for quantity in known if quantity != "samples_per_s" or has_rate_alone]


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


def verdict_word(quantity: Quantity, verdict: Verdict) -> str:
    """Write a verdict in words that suit the quantity.

    >>> verdict_word("memory", "better"), verdict_word("time", "not told apart")
    ('less', 'no measurable difference')
    """
    return _WORDS[quantity].get(verdict) or {"not told apart": "no measurable difference"}.get(verdict, verdict)


def verdict_mark(quantity: Quantity, verdict: Verdict) -> str:
    """Write a verdict for a narrow table cell: ≈ means no measurable difference, ? means too few steps.

    >>> verdict_mark("mfu", "worse"), verdict_mark("time", "not told apart")
    ('lower', '≈')
    """
    return {"not told apart": "≈", "too few steps": "?"}.get(verdict) or verdict_word(quantity, verdict)


def unstable_mark(quantity: Quantity, pair: Pair) -> str:
    return " ~" if pair.is_unstable and quantity != "memory" else ""


def side_text(side: Side) -> str:
    """Write the number of trials by outcome.

    >>> side_text(Side("x", 3, {"ok": 2, "oom_device": 1}))
    '3 trials: 2 ok, 1 oom_device'
    """
    counts = sorted(side.by_outcome.items(), key=lambda one: (one[0] != "ok", -one[1], one[0]))
    by_outcome = ", ".join(f"{amount:,} {word}" for word, amount in counts)
    return plural(side.trials, "trial") + (f": {by_outcome}" if counts else "")


def overall_text(quantity: Quantity, found: Overall) -> str:
    better, worse = verdict_word(quantity, "better"), verdict_word(quantity, "worse")
    return f"{found.better:,} {better}, {found.worse:,} {worse}, {found.undecided:,} without a measurable difference"


def outcome_changes(comparison: SweepComparison) -> list[tuple[str, str, list[Pair]]]:
    """Group pairs with different outcomes by (outcome in A, outcome in B). Those that are `ok` only in A come first."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in comparison.changed_outcomes:
        found.setdefault((pair.outcome_a, pair.outcome_b), []).append(pair)
    ordered = sorted(found.items(), key=lambda one: (one[0][0] != "ok", one[0][1] != "ok", -len(one[1])))
    return [(*outcomes, pairs) for outcomes, pairs in ordered]


def most_telling(pairs: Sequence[Pair], at_most: int) -> list[Pair]:
    """Select at most `at_most` pairs with ratios: measurable differences first, then the largest changes."""
    known = [pair for pair in pairs if pair.ratios]
    if len(known) <= at_most:
        return known
    return sorted(known, key=_telling, reverse=True)[:at_most]


def _telling(pair: Pair) -> tuple[bool, float]:
    ratio = pair.ratios.get("time") or next(iter(pair.ratios.values()))
    decided = Counter(one.verdict in ("better", "worse") for one in pair.ratios.values())[True]
    return decided > 0, max(ratio.ratio, 1 / ratio.ratio)


MOST_PAIRS = 100
MOST_NAMES = 10


def comparison_markdown(comparison: SweepComparison) -> str:
    """Write the comparison as Markdown. Text that comes from trials is escaped, so that it cannot become markup."""
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
            yield f"**Only in {name}** ({len(names):,}): {listed(list(map(escaped, names)), MOST_NAMES)}\n"


def _differences(differences: Sequence[Difference]) -> Iterator[str]:
    if not differences:
        return
    yield "### Differences between the sweeps\n"
    rows = ((one.what, one.a or UNKNOWN, one.b or UNKNOWN) for one in differences)
    yield from markdown_table(("", "A", "B"), (tuple(map(escaped, row)) for row in rows), "lll")


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
    yield from markdown_table(("trainer", "", "geometric mean", "pairs"), cells, "ll")


def _pairs(comparison: SweepComparison) -> Iterator[str]:
    pairs, shown = most_telling(comparison.pairs, MOST_PAIRS), shown_quantities(comparison)
    if not pairs:
        return
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    yield f"### Trials{'' if ran == len(pairs) else f' ({len(pairs)} of {ran:,}, the largest differences)'}\n"
    head = ("trial", *(word for quantity in shown for word in (TITLES[quantity], "")))
    yield from markdown_table(head, (_pair_cells(pair, shown) for pair in pairs), "l")
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
        yield "### Changed outcomes\n"
        for before, after, pairs in changes:
            trials = listed([escaped(pair.trial) for pair in pairs], MOST_NAMES)
            yield f"- {escaped(before)} → {escaped(after)}, {len(pairs):,}: {trials}"
        yield ""


_WIDEST = 110
_MOST_PAIRS = 30
_MOST_NAMES = 5
_MOST_TRAINERS = 12
_FACT_WIDTH = 36
_CELL_WIDTH = 18
_INTERVAL_WIDTH = 17
_WIDTH_FOR_INTERVALS = 96


def print_sweep_comparison(comparison: SweepComparison) -> None:
    """Print the differences between the sweeps, the ratios, the changed outcomes, and how verdicts are decided."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    click.echo()
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        click.secho(_cut(f"{name}  {one_line(side.folder)}", width), bold=True)
        click.secho(_cut(f"   {one_line(side_text(side))}", width), dim=True)
    _print_differences((*comparison.settings, *comparison.environment))
    for note in comparison.notes:
        click.secho(_wrapped(note[:1].upper() + note[1:] + ".", width), fg="yellow")
    _print_overall(comparison, width)
    _print_pairs(comparison, width)
    _print_outcomes(comparison, width)
    for side_name, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            shown = listed([_cut(one_line(name), 60) for name in names], _MOST_NAMES)
            click.echo(_wrapped(f"\nOnly in {side_name}, {len(names):,}: {shown}", width))
    if comparison.overall:
        click.secho("\n" + _wrapped(HOW_DECIDED, width), dim=True)
    click.echo()


def _print_differences(differences: Sequence[Difference]) -> None:
    click.echo()
    if not differences:
        click.echo("Both sweeps have the same settings, versions, devices and hosts.")
        return
    click.secho("The sweeps differ in these, so compare with care:", fg="yellow")
    rows = [
        tuple(_cut(one_line(text or UNKNOWN), _FACT_WIDTH) for text in (one.what, one.a, one.b)) for one in differences
    ]
    what_width, a_width = (max(len(row[column]) for row in rows) for column in range(2))
    for what, a, b in rows:
        click.echo(f"  {what:<{what_width}}  {a:<{a_width}}  {b}")


def _print_overall(comparison: SweepComparison, width: int) -> None:
    if not comparison.overall:
        return
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    click.secho(
        f"\n{ran:,} of {len(comparison.pairs):,} pairs ran to their end in both sweeps. Geometric mean of B / A:",
        bold=True,
    )
    shown = shown_quantities(comparison)
    for quantity in shown:
        if found := comparison.overall.get(quantity):
            words = overall_text(quantity, found)
            click.echo(_cut(f"  {TITLES[quantity]:<10}{ratio_text(found.mean_ratio):>10}  {words}", width))
    if len(comparison.by_trainer) > 1:
        _print_trainers(comparison, shown, width)


def _print_trainers(comparison: SweepComparison, shown: Sequence[Quantity], width: int) -> None:
    trainers = list(comparison.by_trainer.items())
    names = [_cut(one_line(trainer), _FACT_WIDTH) for trainer, _ in trainers[:_MOST_TRAINERS]]
    name_width = max(map(len, names))
    heading = "".join(f"{TITLES[quantity]:>11}" for quantity in shown)
    click.secho(_cut(f"\n  {'':<{name_width}}{heading}", width), dim=True)
    for name, (_, found) in zip(names, trainers, strict=False):
        cells = "".join(f"{ratio_text(found[one].mean_ratio) if one in found else UNKNOWN:>11}" for one in shown)
        click.echo(_cut(f"  {name:<{name_width}}{cells}", width))
    if len(trainers) > _MOST_TRAINERS:
        click.secho(f"  and {len(trainers) - _MOST_TRAINERS:,} more", dim=True)


def _print_pairs(comparison: SweepComparison, width: int) -> None:
    pairs, shown = most_telling(comparison.pairs, _MOST_PAIRS), shown_quantities(comparison)
    if not pairs:
        return
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    of_all = "" if ran == len(pairs) else f": the {len(pairs)} largest differences of {ran:,}; --json has all"
    click.secho(f"\nTrials{of_all}", bold=True)
    has_intervals = width >= _WIDTH_FOR_INTERVALS
    widths = [_CELL_WIDTH + (_INTERVAL_WIDTH if has_intervals and place == 0 else 0) for place in range(len(shown))]
    name_width = min(max(width - 2 - sum(widths), 20), max(len(one_line(pair.trial)) for pair in pairs))
    heads = "".join(f"  {TITLES[quantity]:<{cell - 2}}" for quantity, cell in zip(shown, widths, strict=True))
    click.secho(f"  {'':<{name_width}}{heads}".rstrip(), dim=True)
    for pair in pairs:
        click.echo(f"  {_ends(one_line(pair.trial), name_width):<{name_width}}", nl=False)
        for quantity, cell in zip(shown, widths, strict=True):
            _print_ratio(quantity, pair, cell)
        click.echo()
        for difference in pair.differences:
            words = f"{difference.what} {difference.a or UNKNOWN} → {difference.b or UNKNOWN}"
            click.secho(_cut(f"    {one_line(words)}", width), fg="yellow")


def _print_ratio(quantity: Quantity, pair: Pair, width: int) -> None:
    ratio = pair.ratios.get(quantity)
    if ratio is None:
        click.echo(f"  {UNKNOWN:<{width - 2}}", nl=False)
        return
    interval = f" {interval_text(ratio):<{_INTERVAL_WIDTH - 1}}" if width > _CELL_WIDTH else ""
    colour = {"better": "green", "worse": "red"}.get(ratio.verdict)
    text = f"{ratio_text(ratio.ratio)}{interval} {verdict_mark(quantity, ratio.verdict)}{unstable_mark(quantity, pair)}"
    click.secho(f"  {text:<{width - 2}}", fg=colour, nl=False)


def _print_outcomes(comparison: SweepComparison, width: int) -> None:
    changes = outcome_changes(comparison)
    if not changes:
        return
    click.secho("\nChanged outcomes", bold=True)
    for before, after, pairs in changes:
        colour = "red" if before == "ok" else "green" if after == "ok" else None
        click.secho(_cut(f"  {one_line(before)} → {one_line(after)}, {len(pairs):,}", width), fg=colour)
        for pair in pairs[:_MOST_NAMES]:
            click.echo(_cut(f"    {one_line(pair.trial)}{_why(pair)}", width))
        if len(pairs) > _MOST_NAMES:
            click.secho(f"    and {len(pairs) - _MOST_NAMES:,} more", dim=True)


def _why(pair: Pair) -> str:
    reason = pair.reason_b or pair.reason_a
    return f": {one_line(reason)}" if reason else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def _ends(text: str, width: int) -> str:
    """Shorten a trial's name in the middle, because the trainer is at its start and the sizes are at its end."""
    first = width // 3
    return text if len(text) <= width else text[:first] + "..." + text[len(text) - (width - first - 3) :]


def _wrapped(text: str, width: int) -> str:
    lead = "\n" if text.startswith("\n") else ""
    return lead + textwrap.fill(one_line(text), width)


def comparison_json(comparison: SweepComparison) -> str:
    """Write the whole comparison as JSON without rounding, one pair of trials per line."""
    return json_document(record_fields(comparison))
