"""`flopwatch sweep` runs every trial of a matrix, `trial` measures one, `fit` finds the largest and the fastest batch.

This file declares the flags. `sweep_run.py` and `trial_run.py` do what they ask for.
"""

from pathlib import Path
from typing import Annotated, Any

from flopwatch.cli import argument, flag
from flopwatch.records.settings import SETTINGS
from flopwatch.spellings import SWEEP


def _setting(name: str) -> Any:
    """The flag of a setting of a trial, also in the spellings of docs/requirements.md."""
    words = (name, *(word for word, setting in SWEEP.items() if setting == name))
    return flag(SETTINGS[name].text, *(f"--{word.replace('_', '-')}" for word in words))


_MORE_SETTINGS = "Settings without a flag, such as checkpointing=true options.noise_multiplier=0.8 privacy.epochs=3."
_Trainer = Annotated[str | None, _setting("trainer")]
_BatchSize = Annotated[str | None, _setting("batch_size")]
_SeqLen = Annotated[str | None, _setting("seq_len")]
_Model = Annotated[str | None, _setting("model")]
_Command = Annotated[str | None, _setting("command")]
_Dtype = Annotated[str | None, _setting("dtype")]
_Steps = Annotated[int | None, _setting("steps")]
_Memory = Annotated[str | None, flag("Limit of host memory for each trial, such as 4GiB.")]
_Timeout = Annotated[str | None, flag("End a trial after this time, such as 30m. Default: 1h.")]
_Words = Annotated[list[str] | None, argument(_MORE_SETTINGS, "[KEY=VALUE]...")]
_AsJson = Annotated[bool, flag("Print the result as JSON.", "--json")]


def trial(
    words: _Words = None,
    trainer: _Trainer = None,
    batch_size: _BatchSize = None,
    seq_len: _SeqLen = None,
    model: _Model = None,
    command: _Command = None,
    dtype: _Dtype = None,
    steps: _Steps = None,
    memory: _Memory = None,
    timeout: _Timeout = None,
    spec: Annotated[Path | None, flag("Run an earlier trial again: the path of its spec.json.")] = None,
    attempt: Annotated[str | None, flag("With --spec: run this attempt for its sweep, as jobs of Slurm do.")] = None,
    output: Annotated[Path | None, flag("Folder for the result. Default: flopwatch-sweep.", "--output", "-o")] = None,
    as_json: _AsJson = False,
) -> None:
    """Measure one trial in a separate process: step time, memory, FLOPs and MFU, or the reason why it failed."""
    given = locals()
    if given.pop("attempt") is not None and spec is not None:
        from flopwatch.sweep.supervisor.supervise import main

        raise SystemExit(main([str(spec.parent.parent.parent), spec.parent.name, str(attempt)]))
    from flopwatch.cli.trials.trial_run import run_trial

    run_trial(**given)


def fit(
    words: _Words = None,
    trainer: _Trainer = None,
    seq_len: _SeqLen = None,
    model: _Model = None,
    command: _Command = None,
    dtype: _Dtype = None,
    steps: _Steps = None,
    memory: Annotated[
        str | None,
        flag("Limit of host memory for each trial, such as 2GiB. Default on a CPU: the free memory less a margin."),
    ] = None,
    max_batch: Annotated[int, flag("The largest batch size to try.")] = 4096,
    timeout: _Timeout = None,
    output: Annotated[Path, flag("Folder of the trials. A fit already in it is resumed.", "--output", "-o")] = Path(
        "flopwatch-fit"
    ),
    as_json: _AsJson = False,
) -> None:
    """Find the largest batch size that fits in memory, and the fastest one.

    The batch is doubled until it does not fit; then the range between the last two is halved. Ctrl-C ends the search
    and keeps the finished trials.
    """
    given = locals()
    from flopwatch.cli.trials.trial_run import run_fit

    run_fit(**given)


def sweep(
    words: Annotated[
        list[str] | None,
        argument(f"A YAML file that describes the matrix. {_MORE_SETTINGS}", "[FILE] [KEY=VALUE]..."),
    ] = None,
    output: Annotated[
        Path | None,
        flag("Folder of the sweep. A sweep already in it is resumed. Default: flopwatch-sweep.", "--output", "-o"),
    ] = None,
    # The matrix; several values are separated by commas.
    trainer: _Trainer = None,
    batch_size: _BatchSize = None,
    seq_len: _SeqLen = None,
    model: _Model = None,
    command: _Command = None,
    dtype: _Dtype = None,
    steps: _Steps = None,
    repeats: Annotated[int | None, flag("Runs of each trial. With 3 or more, intervals include their spread.")] = None,
    exclude: Annotated[list[str] | None, flag("Leave out trials, such as 'trainer=ghost seq_len>=1024'.")] = None,
    memory: _Memory = None,
    timeout: _Timeout = None,
    # Where trials run.
    engine: Annotated[str, flag("Where trials run: local, ray or slurm.")] = "local",
    engine_option: Annotated[list[str] | None, flag("An option of the engine, such as partition=gpu.")] = None,
    jobs: Annotated[int, flag("How many trials run at once on a machine without GPUs.")] = 1,
    # Which trials run, and for how long.
    only: Annotated[str | None, flag("Run only these trials: failed, oom or missing.")] = None,
    limit: Annotated[str | None, flag("Run a part of the matrix: 20 (the first 20 trials), or 100:200.")] = None,
    budget: Annotated[str | None, flag("Start no new trial after this time, such as 8h or 90m.")] = None,
    quick: Annotated[bool, flag("Run each trainer on a tiny model for 3 steps; a minute or two.", "--quick")] = False,
    dry_run: Annotated[bool, flag("Show the trials and the predicted time; run nothing.", "--dry-run")] = False,
) -> None:
    """Measure every trial of a matrix, each in its own process. Run the same command again to resume.

    Several values of a setting are separated by commas: --batch-size 4,8. The first Ctrl-C finishes running trials and
    starts no more; the second ends running trials. `flopwatch watch DIR` shows a sweep that runs in another terminal.
    """
    given = locals()
    from flopwatch.cli.trials.sweep_run import run_command

    run_command(**given)
