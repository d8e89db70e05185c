"""`flopwatch sweep` runs every trial of a matrix, `trial` measures one, `fit` finds the largest and the fastest batch.

This file declares the flags. `sweep_run.py` and `trial_run.py` do what they ask for.
"""

from pathlib import Path
from typing import Annotated

from flopwatch.cli import argument, flag
from flopwatch.records.settings import SETTINGS

_MORE_SETTINGS = "options.noise_multiplier=0.8 privacy.dataset_size=50000 privacy.epochs=3"
_Trainer = Annotated[str, flag(SETTINGS["trainer"].flag)]
_SeqLen = Annotated[int, flag(SETTINGS["seq_len"].flag)]
_Model = Annotated[str, flag(SETTINGS["model"].flag, "--model", "--model-size")]
_Command = Annotated[str | None, flag(SETTINGS["command"].flag)]
_Dtype = Annotated[str, flag(SETTINGS["dtype"].flag)]
_Device = Annotated[str, flag(SETTINGS["device"].flag)]
_Checkpointing = Annotated[bool, flag(SETTINGS["checkpointing"].flag, "--checkpoint")]
_Steps = Annotated[int, flag(SETTINGS["steps"].flag)]
_Timeout = Annotated[float, flag("End a trial after this many seconds.")]
_AsJson = Annotated[bool, flag("Print the result as JSON.", "--json")]


def trial(
    words: Annotated[
        list[str] | None, argument(f"Further settings, such as {_MORE_SETTINGS}.", "[KEY=VALUE]...")
    ] = None,
    trainer: _Trainer = "standard",
    batch_size: Annotated[int, flag(SETTINGS["batch_size"].flag)] = 4,
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpointing: _Checkpointing = False,
    steps: _Steps = 10,
    memory: Annotated[str | None, flag("Limit of host memory for the trial, such as 4GiB.")] = None,
    timeout: _Timeout = 3600.0,
    spec: Annotated[Path | None, flag("Run an earlier trial again: the path of its spec.json.")] = None,
    output: Annotated[Path | None, flag("Folder for the result. Default: flopwatch-sweep.", "--output", "-o")] = None,
    as_json: _AsJson = False,
) -> None:
    """Measure one trial in a separate process: step time, memory, FLOPs and MFU, or the reason why it failed."""
    given = locals()
    from flopwatch.cli.trials.trial_run import run_trial

    run_trial(**given)


def fit(
    words: Annotated[
        list[str] | None,
        argument("Further settings, such as warmup_steps=1 threads=4.", "[KEY=VALUE]..."),
    ] = None,
    trainer: _Trainer = "standard",
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpointing: _Checkpointing = False,
    steps: _Steps = 5,
    memory: Annotated[
        str | None,
        flag("Limit of host memory for each trial, such as 2GiB. Default on a CPU: the free memory less a margin."),
    ] = None,
    max_batch: Annotated[int, flag("The largest batch size to try.")] = 4096,
    timeout: _Timeout = 3600.0,
    output: Annotated[Path, flag("Folder of the trials. A fit already in it is resumed.", "--output", "-o")] = Path(
        "flopwatch-fit"
    ),
    no_preflight: Annotated[
        bool, flag("Do not try the trainer on a tiny copy of the model first.", "--no-preflight")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Find the largest batch size that fits in memory, and the fastest one, with a few trials.

    Two small trials predict the largest batch, and trials at that size and just above it verify the prediction. Ctrl-C
    ends the search and keeps the finished trials.
    """
    given = locals()
    from flopwatch.cli.trials.trial_run import run_fit

    run_fit(**given)


def sweep(
    words: Annotated[
        list[str] | None,
        argument(
            "A YAML file that describes the matrix, and settings such as batch_size=1,2,4. 'attach DIR' shows and "
            "'stop DIR' stops a running sweep.",
            "[FILE] [KEY=VALUE]...",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        flag("Folder of the sweep. A sweep already in it is resumed. Default: flopwatch-sweep.", "--output", "-o"),
    ] = None,
    # The matrix.
    trainers: Annotated[str | None, flag(SETTINGS["trainer"].flags)] = None,
    batch_sizes: Annotated[str | None, flag(SETTINGS["batch_size"].flags)] = None,
    seq_lens: Annotated[str | None, flag(SETTINGS["seq_len"].flags)] = None,
    models: Annotated[str | None, flag(SETTINGS["model"].flags, "--models", "--model-size")] = None,
    dtypes: Annotated[str | None, flag(SETTINGS["dtype"].flags)] = None,
    command: Annotated[str | None, flag(SETTINGS["command"].flags)] = None,
    steps: Annotated[int | None, flag(SETTINGS["steps"].flags)] = None,
    exclude: Annotated[list[str] | None, flag("Leave out trials, such as 'trainer=ghost seq_len>=1024'.")] = None,
    # The limits of a trial.
    memory: Annotated[str | None, flag("Limit of host memory for each trial, such as 4GiB.")] = None,
    timeout: Annotated[float | None, flag("End a trial after this many seconds. Default: 3600.")] = None,
    no_progress: Annotated[
        float | None, flag("End a trial that finishes no step for this many seconds. Default: 600.")
    ] = None,
    # Where trials run.
    engine: Annotated[str, flag("Where trials run: local, ray or slurm.")] = "local",
    engine_option: Annotated[list[str] | None, flag("An option of the engine, such as partition=gpu.")] = None,
    jobs: Annotated[int, flag("How many trials run at once on a machine without GPUs.")] = 1,
    gpu_ids: Annotated[str | None, flag("Indices of the GPUs to use, such as 0,1. Default: all.", "--gpu-ids")] = None,
    gpus_per_trial: Annotated[float | None, flag("GPUs of each trial; with 0.5, two trials share one GPU.")] = None,
    # Which trials run, in which order, and for how long.
    only: Annotated[str | None, flag("Run only these trials: failed, oom or missing.")] = None,
    limit: Annotated[str | None, flag("Run a part of the matrix: 20 (the first 20 trials), or 100:200.")] = None,
    retries: Annotated[int | None, flag("Retries of a trial that was lost or preempted. Default: 2.")] = None,
    retry_on: Annotated[str | None, flag("Outcomes to retry besides 'lost': error,crash,timeout,hang.")] = None,
    until: Annotated[
        str | None, flag("Repeat trials until the interval of the step time is at most this wide, such as 5%.")
    ] = None,
    max_repeats: Annotated[int | None, flag("Repeats of a trial with --until. Default: 5.")] = None,
    budget: Annotated[str | None, flag("Start no new trial after this time, such as 8h or 90m.")] = None,
    detach: Annotated[bool, flag("Run in the background; `flopwatch sweep attach` shows it.", "--detach")] = False,
    order_seed: Annotated[int, flag("Seed of the random order in which trials run.", "--order-seed")] = 0,
    in_order: Annotated[bool, flag("Run trials in the order of the matrix.", "--in-order")] = False,
    # Checks before the sweep, and traces.
    quick: Annotated[bool, flag("Run each trainer on a tiny model for 3 steps; about a minute.", "--quick")] = False,
    dry_run: Annotated[bool, flag("Show the trials and the predicted time; run nothing.", "--dry-run")] = False,
    only_preflight: Annotated[bool, flag("Only show which trainer supports which model.", "--only-preflight")] = False,
    no_preflight: Annotated[bool, flag("Do not try trainers on a tiny model first.", "--no-preflight")] = False,
    no_trace: Annotated[bool, flag("Record no Kineto traces.", "--no-trace")] = False,
) -> None:
    """Measure every trial of a matrix, each in its own process. Run the same command again to resume.

    The first Ctrl-C finishes running trials and starts no more; the second ends running trials. `flopwatch sweep
    attach DIR` shows a sweep that runs in another terminal, `flopwatch sweep stop DIR` sends it a Ctrl-C.
    """
    given = locals()
    from flopwatch.cli.trials.sweep_run import run_command

    run_command(**given)
