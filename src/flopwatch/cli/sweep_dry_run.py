"""`flopwatch sweep --dry-run`: the matrix, what of it is done, and how long the rest may take."""

from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flopwatch.cli.outcome_style import outcome_text
from flopwatch.cli.quantities import duration, plural
from flopwatch.plain_text import one_line
from flopwatch.sweep.plan import Plan
from flopwatch.trial_records import TrialSpec

_MOST_ROWS = 60


def print_dry_run(plan: Plan, output: Path, console: Console | None = None) -> None:
    console = console or Console()
    todo = {trial.name for trial in plan.todo}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("trial", "model", "state"):
        table.add_column(column, no_wrap=column == "trial")
    for trial in plan.trials[:_MOST_ROWS]:
        kept = plan.kept.get(trial.name)
        left = "written by a newer flopwatch" if trial.name in plan.newer else "left out"
        state = "will run" if trial.name in todo else outcome_text(kept.outcome) if kept else left
        table.add_row(Text(one_line(trial.name)), Text(one_line(trial.spec.model, 200)), state)
    console.print(table)
    if len(plan.trials) > _MOST_ROWS:
        console.print(f"and {len(plan.trials) - _MOST_ROWS} more", style="dim")
    folder = one_line(str(output))
    console.print(
        Text(f"{plural(len(plan.trials), 'trial')}, {len(plan.todo)} to run in {folder}. {_prediction(plan)}")
    )
    _tell_troubles(plan, console)


def _tell_troubles(plan: Plan, console: Console) -> None:
    for trouble in plan.troubles:
        console.print(Text(one_line(f"warning: {trouble}", 1000)), soft_wrap=True)


def _prediction(plan: Plan) -> str:
    """From trials like these that ran here before; without one nobody can say."""
    seconds = [_like(plan, trial.spec) for trial in plan.todo]
    known = [value for value in seconds if value is not None]
    if not plan.todo:
        return "Nothing to do."
    if not known:
        return "How long it takes is known after the first trials."
    total = sum(known) / len(known) * len(seconds)
    return f"About {duration(total)}, one after the other (from {len(plan.kept)} trials that ran here)."


def _like(plan: Plan, spec: TrialSpec) -> float | None:
    """Median time of the trials with the same trainer and model."""
    times = [
        result.seconds
        for result in plan.kept.values()
        if result.seconds is not None and (result.spec.trainer, result.spec.model) == (spec.trainer, spec.model)
    ]
    return median(times) if times else None
