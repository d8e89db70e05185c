"""What `flopwatch sweep` does: reads the matrix, runs its trials, and says what to do next."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

from flopwatch.cli import print_error, say
from flopwatch.cli.streams import lasting_output
from flopwatch.cli.trials.sweep_screens import print_dry_run, shown_sweep
from flopwatch.errors import InputError
from flopwatch.sweep.engines.protocol import Engine, load_engine
from flopwatch.sweep.folder import FolderGoneError
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import OVER_BUDGET, STOPPED, Plan, exit_status, failed_before, make_plan, trials_left
from flopwatch.sweep.spec.matrix import Matrix, layered, read_matrix
from flopwatch.sweep.spec.parsing import parse_overrides, settings_without_flags
from flopwatch.sweep.start import checked, run_sweep
from flopwatch.text import one_line, plural

_QUICK = {"model": "tiny", "batch_size": [2], "seq_len": [64], "steps": 3, "warmup_steps": 1, "batch": None}


def run_command(words: list[str] | None, output: Path | None, **given: Any) -> None:
    matrix = _matrix(words or [], given)
    specs, rules = checked(matrix)
    engine = _engine(given["engine"], given["engine_option"] or [], given["jobs"])
    output = output or Path("flopwatch-quick" if given["quick"] else "flopwatch-sweep")
    plan = partial(make_plan, output, specs, only=given["only"], limit=given["limit"], engine=engine.name)
    if given["dry_run"]:
        print_dry_run(plan(), output)
        return
    with lasting_output():
        try:
            result = run_sweep(output, plan, engine, _warn, shown_sweep, **rules)
        except FolderGoneError as error:
            print_error(str(error))
            raise SystemExit(1) from None
        _print_next_steps(output, *result)


def _warn(text: str) -> None:
    say(one_line(f"warning: {text}", 1000), err=True)


def _matrix(words: list[str], given: dict[str, Any]) -> Matrix:
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise InputError(f"name only one YAML file, got {', '.join(files)}; write settings as --batch-size 1,2,4")
    settings = settings_without_flags([word for word in words if "=" in word])
    flags = {name: given[name] for name in Matrix.model_fields if given.get(name) is not None}
    return read_matrix(Path(files[0]) if files else None, layered(settings, flags, _QUICK if given["quick"] else {}))


def _engine(name: str, options: list[str], jobs: int) -> Engine:
    settings = parse_overrides(options)
    return load_engine(name, settings | {"jobs": jobs} if name == "local" else settings)


def _print_next_steps(output: Path, plan: Plan, counts: dict[str, int], stop: Stop) -> None:
    say(f"Next: flopwatch report {one_line(shlex.quote(str(output)))}")
    if before := failed_before(plan):
        say(f"{plural(before, 'trial')} failed in an earlier run; run them again with: --only failed")
    status = exit_status(plan, counts, was_stopped=stop.finish or stop.kill, is_over_budget=stop.is_over_budget)
    if status in (STOPPED, OVER_BUDGET):
        why = "The budget is used up: " if status == OVER_BUDGET else ""
        say(f"{why}{plural(trials_left(plan, counts), 'trial')} left; run the same command again to resume.")
    if status:
        raise SystemExit(status)
