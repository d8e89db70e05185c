"""What private trainings would spend: one row for each batch size and noise. Pure."""

from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, Context

from flopwatch.report.figures import UNKNOWN
from flopwatch.report.records import Group, PrivacyRow
from flopwatch.trial_records import PrivacySpent, TrialResult

HEADINGS = ("batch", "noise", "sampling rate", "steps", "delta", "accountant", "epsilon", "trainers")

ASSUMED = (
    "Epsilon is of a whole training with these settings, by Opacus's accountant, rounded up: it holds for Poisson "
    "sampling with the logical batch. The trials themselves train on random data and spend nothing."
)
NOT_ASKED = (
    "Epsilon was not asked for: add `privacy: {dataset_size: N, epochs: M}` to the matrix to see what a training would "
    "spend."
)


def privacy_rows(trials: Iterable[tuple[str, TrialResult]]) -> tuple[PrivacyRow, ...]:
    """From (column, result); trainers that spend the same stand together."""
    found: dict[tuple[int, PrivacySpent], list[str]] = {}
    for column, result in trials:
        if result.outcome == "ok" and result.measured.privacy is not None:
            found.setdefault((result.spec.batch_size, result.measured.privacy), []).append(column)
    rows = [PrivacyRow(batch, tuple(dict.fromkeys(columns)), spent) for (batch, spent), columns in found.items()]
    return tuple(sorted(rows, key=lambda row: (row.batch_size, row.spent.noise_multiplier)))


def privacy_cells(row: PrivacyRow) -> tuple[str, ...]:
    spent = row.spent
    return (
        str(row.batch_size),
        f"{spent.noise_multiplier:.4g}",
        f"{spent.sample_rate:.4g}",
        f"{spent.steps:,}",
        f"{spent.delta:.3g}",
        spent.accountant,
        epsilon_text(spent.epsilon),
        ", ".join(row.trainers),
    )


def epsilon_text(epsilon: float | None) -> str:
    """Four digits, rounded up, since it is a bound.

    >>> epsilon_text(1.83831), epsilon_text(None)
    ('1.839', '–')
    """
    if epsilon is None:
        return UNKNOWN
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon)):.4g}"


def privacy_notes(group: Group) -> list[str]:
    """What stands below the table; for private trainers without one, that nobody asked."""
    if group.privacy_spent:
        return [ASSUMED, *_own_notes(group.privacy_spent)]
    has_private = any(cell.privacy == "private" and cell.outcome == "ok" for cell in group.cells)
    return [NOT_ASKED] if has_private else []


def _own_notes(rows: Sequence[PrivacyRow]) -> list[str]:
    batches: dict[str, list[int]] = {}
    for row in rows:
        if row.spent.note:
            batches.setdefault(row.spent.note, []).append(row.batch_size)
    return [f"Batch {', '.join(map(str, dict.fromkeys(sizes)))}: {note}." for note, sizes in batches.items()]
