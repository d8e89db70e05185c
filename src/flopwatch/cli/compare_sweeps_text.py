"""A comparison of two sweeps as text. Not with rich: nothing of a trial may be taken for markup."""

import shutil
import textwrap
from collections.abc import Sequence

import typer

from flopwatch.plain_text import one_line
from flopwatch.report.figures import UNKNOWN
from flopwatch.sweep_comparison.records import Difference, Pair, Quantity, SweepComparison
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
    verdict_mark,
)

_WIDEST = 110
_MOST_PAIRS = 30
_MOST_NAMES = 5
_MOST_TRAINERS = 12
_FACT_WIDTH = 36
_CELL_WIDTH = 18
_INTERVAL_WIDTH = 17
_WIDTH_FOR_INTERVALS = 96


def print_sweep_comparison(comparison: SweepComparison) -> None:
    """Print what differs, the ratios, what ended in another way, and how far it can be trusted."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    typer.echo()
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        typer.secho(_cut(f"{name}  {one_line(side.folder)}", width), bold=True)
        typer.secho(_cut(f"   {one_line(side_text(side))}", width), dim=True)
    _print_differences((*comparison.settings, *comparison.environment))
    for note in comparison.notes:
        typer.secho(_wrapped(note[:1].upper() + note[1:] + ".", width), fg="yellow")
    _print_overall(comparison, width)
    _print_pairs(comparison, width)
    _print_outcomes(comparison, width)
    for side_name, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            typer.echo(_wrapped(f"\nOnly in {side_name}, {len(names):,}: {_some(names)}", width))
    if comparison.overall:
        typer.secho("\n" + _wrapped(HOW_DECIDED, width), dim=True)
    typer.echo()


def _print_differences(differences: Sequence[Difference]) -> None:
    typer.echo()
    if not differences:
        typer.echo("Nothing differs in settings, versions, devices or hosts.")
        return
    typer.secho("Not the same in both, so compare with care:", fg="yellow")
    rows = [
        tuple(_cut(one_line(text or UNKNOWN), _FACT_WIDTH) for text in (one.what, one.a, one.b)) for one in differences
    ]
    what_width, a_width = (max(len(row[column]) for row in rows) for column in range(2))
    for what, a, b in rows:
        typer.echo(f"  {what:<{what_width}}  {a:<{a_width}}  {b}")


def _print_overall(comparison: SweepComparison, width: int) -> None:
    if not comparison.overall:
        return
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    typer.secho(
        f"\n{ran:,} of {len(comparison.pairs):,} pairs ran to their end in both. Geometric mean of B / A:", bold=True
    )
    shown = shown_quantities(comparison)
    for quantity in shown:
        if found := comparison.overall.get(quantity):
            words = overall_text(quantity, found)
            typer.echo(_cut(f"  {TITLES[quantity]:<10}{ratio_text(found.mean_ratio):>10}  {words}", width))
    if len(comparison.by_trainer) > 1:
        _print_trainers(comparison, shown, width)


def _print_trainers(comparison: SweepComparison, shown: Sequence[Quantity], width: int) -> None:
    trainers = list(comparison.by_trainer.items())
    names = [_cut(one_line(trainer), _FACT_WIDTH) for trainer, _ in trainers[:_MOST_TRAINERS]]
    name_width = max(map(len, names))
    heading = "".join(f"{TITLES[quantity]:>11}" for quantity in shown)
    typer.secho(_cut(f"\n  {'':<{name_width}}{heading}", width), dim=True)
    for name, (_, found) in zip(names, trainers, strict=False):
        cells = "".join(f"{ratio_text(found[one].mean_ratio) if one in found else UNKNOWN:>11}" for one in shown)
        typer.echo(_cut(f"  {name:<{name_width}}{cells}", width))
    if len(trainers) > _MOST_TRAINERS:
        typer.secho(f"  and {len(trainers) - _MOST_TRAINERS:,} more", dim=True)


def _print_pairs(comparison: SweepComparison, width: int) -> None:
    pairs, shown = most_telling(comparison.pairs, _MOST_PAIRS), shown_quantities(comparison)
    if not pairs:
        return
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    of_all = "" if ran == len(pairs) else f": the {len(pairs)} largest differences of {ran:,}; --json has all"
    typer.secho(f"\nTrials{of_all}", bold=True)
    has_intervals = width >= _WIDTH_FOR_INTERVALS
    widths = [_CELL_WIDTH + (_INTERVAL_WIDTH if has_intervals and place == 0 else 0) for place in range(len(shown))]
    name_width = min(max(width - 2 - sum(widths), 20), max(len(one_line(pair.trial)) for pair in pairs))
    heads = "".join(f"  {TITLES[quantity]:<{cell - 2}}" for quantity, cell in zip(shown, widths, strict=True))
    typer.secho(f"  {'':<{name_width}}{heads}".rstrip(), dim=True)
    for pair in pairs:
        typer.echo(f"  {_ends(one_line(pair.trial), name_width):<{name_width}}", nl=False)
        for quantity, cell in zip(shown, widths, strict=True):
            _print_ratio(quantity, pair, cell)
        typer.echo()
        for difference in pair.differences:
            words = f"{difference.what} {difference.a or UNKNOWN} → {difference.b or UNKNOWN}"
            typer.secho(_cut(f"    {one_line(words)}", width), fg="yellow")


def _print_ratio(quantity: Quantity, pair: Pair, width: int) -> None:
    ratio = pair.ratios.get(quantity)
    if ratio is None:
        typer.echo(f"  {UNKNOWN:<{width - 2}}", nl=False)
        return
    interval = f" {interval_text(ratio):<{_INTERVAL_WIDTH - 1}}" if width > _CELL_WIDTH else ""
    colour = {"better": "green", "worse": "red"}.get(ratio.verdict)
    text = f"{ratio_text(ratio.ratio)}{interval} {verdict_mark(quantity, ratio.verdict)}{unstable_mark(quantity, pair)}"
    typer.secho(f"  {text:<{width - 2}}", fg=colour, nl=False)


def _print_outcomes(comparison: SweepComparison, width: int) -> None:
    changes = outcome_changes(comparison)
    if not changes:
        return
    typer.secho("\nEnded in another way", bold=True)
    for before, after, pairs in changes:
        colour = "red" if before == "ok" else "green" if after == "ok" else None
        typer.secho(_cut(f"  {one_line(before)} → {one_line(after)}, {len(pairs):,}", width), fg=colour)
        for pair in pairs[:_MOST_NAMES]:
            typer.echo(_cut(f"    {one_line(pair.trial)}{_why(pair)}", width))
        if len(pairs) > _MOST_NAMES:
            typer.secho(f"    and {len(pairs) - _MOST_NAMES:,} more", dim=True)


def _why(pair: Pair) -> str:
    reason = pair.reason_b or pair.reason_a
    return f": {one_line(reason)}" if reason else ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(_cut(one_line(name), 60) for name in names[:_MOST_NAMES]) + more


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def _ends(text: str, width: int) -> str:
    """Of a trial's name both ends tell: the trainer, and the sizes."""
    first = width // 3
    return text if len(text) <= width else text[:first] + "..." + text[len(text) - (width - first - 3) :]


def _wrapped(text: str, width: int) -> str:
    lead = "\n" if text.startswith("\n") else ""
    return lead + textwrap.fill(one_line(text), width)
