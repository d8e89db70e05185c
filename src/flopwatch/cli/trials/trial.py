"""`flopwatch trial` measures one trial; `flopwatch fit` finds the largest and the fastest batch size."""

from pathlib import Path
from typing import Annotated

from flopwatch.cli import argument, flag

MODEL_HELP = "tiny, small, medium or 1b; the path of a Hugging Face config.json; or module:function."
COMMAND_HELP = "Run a shell command instead of a trainer: 'python t.py --bs {batch_size}'."
_MORE_SETTINGS = "options.noise_multiplier=0.8 privacy.dataset_size=50000 privacy.epochs=3"
_Trainer = Annotated[str, flag("The trainer: standard, dpsgd, ghost, fast or package.module:Class.")]
_SeqLen = Annotated[int, flag("Sequence length: tokens of each sample.")]
_Model = Annotated[str, flag(MODEL_HELP, "--model", "--model-size")]
_Command = Annotated[str | None, flag(COMMAND_HELP)]
_Dtype = Annotated[str, flag("Compute type: fp32 or bf16.")]
_Device = Annotated[str, flag("The device, such as cpu or cuda; auto takes the accelerator if there is one.")]
_Checkpoint = Annotated[bool, flag("Use gradient checkpointing.", "--checkpoint")]
_Steps = Annotated[int, flag("Measured steps.")]
_Timeout = Annotated[float, flag("End a trial after this many seconds.")]
_AsJson = Annotated[bool, flag("Print the result as JSON.", "--json")]


def trial(
    words: Annotated[
        list[str] | None, argument(f"Further settings, such as {_MORE_SETTINGS}.", "[KEY=VALUE]...")
    ] = None,
    trainer: _Trainer = "standard",
    batch_size: Annotated[int, flag("Samples per step.")] = 4,
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpoint: _Checkpoint = False,
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
    checkpoint: _Checkpoint = False,
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
