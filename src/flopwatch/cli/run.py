"""`flopwatch run`: starts a training script and monitors it without changing it."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from flopwatch.automatic.script import check_module, check_script, run_module, run_script
from flopwatch.automatic.session import default_output_dir, tell_children, watch
from flopwatch.cli import argument, flag, flops_per_s
from flopwatch.errors import InputError
from flopwatch.hardware.peaks import canonical_dtype
from flopwatch.records.flops import AttentionConvention
from flopwatch.sinks.thread import check_name, split_port


def run(
    command: Annotated[list[str], argument("The script, and after it the script's arguments.", "SCRIPT...")],
    is_module: Annotated[bool, flag("Run a module, as `python -m` does.", "-m")] = False,
    output_dir: Annotated[Path | None, flag("The run's folder; by default a new one in flopwatch-runs.")] = None,
    log_every: Annotated[int | None, flag("Steps per line and row; by default 50, or 10 seconds.")] = None,
    sinks: Annotated[
        str | None, flag("Also: tensorboard, wandb, mlflow, prometheus, prometheus:PORT; comma-separated.")
    ] = None,
    config: Annotated[Path | None, flag("A YAML file with settings of the monitor.")] = None,
    peak_tflops: Annotated[float | None, flag("Dense peak of one device, if flopwatch does not know it.")] = None,
    dtype: Annotated[str | None, flag("Compute type whose peak MFU is compared with, such as bf16.")] = None,
    attention: Annotated[str | None, flag("full or causal: whether masked pairs of positions count.")] = None,
    quiet: Annotated[bool, flag("Print no lines; only write the log.", "--quiet")] = False,
) -> Callable[[], None]:
    """Run a training script unchanged, and show its FLOPs, MFU and rates on stderr."""
    if config is not None and not config.exists():
        raise InputError(f"there is no configuration file {config}; `flopwatch init {config}` writes one")
    (check_module if is_module else check_script)(command[0])
    names = [name.strip() for name in (sinks or "").split(",") if name.strip()]
    _check(log_every, names, dtype, attention)
    given = {
        "log_every": log_every,
        "sinks": names or None,
        "config": config,
        "peak_flops_per_s": None if peak_tflops is None else flops_per_s(peak_tflops),
        "dtype": dtype,
        "attention": attention,
        "quiet": quiet,
    }
    options = {name: value for name, value in given.items() if value is not None}
    # `main` calls this after click has returned, which would change how the script's exceptions end the process.
    return partial(_start, command, is_module, output_dir, options)


def _check(log_every: int | None, sinks: list[str], dtype: str | None, attention: str | None) -> None:
    """Raise InputError for a value that the monitor would leave out with a message, while the training goes on."""
    if log_every is not None and log_every < 1:
        raise InputError(f"--log-every must be 1 step or more, got {log_every}")
    try:
        for name in sinks:
            check_name(name)
            split_port(name)
        if dtype is not None:
            canonical_dtype(dtype)
    except InputError as error:
        # These texts are for Python too, where an object can be given instead of a name.
        text = str(error).replace(", or an object of such a class", "").replace(", or a torch.dtype", "")
        raise InputError(f"in the options of flopwatch run, {text}") from None
    known = get_args(AttentionConvention)
    if attention is not None and attention not in known:
        close = get_close_matches(attention, known, n=1)
        maybe = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"--attention must be {' or '.join(known)}, got {attention!r}{maybe}")


def _start(command: list[str], is_module: bool, output_dir: Path | None, options: dict[str, Any]) -> None:
    """Run the script; what it raises, `SystemExit` too, passes through."""
    folder = (output_dir or default_output_dir(command[0])).absolute()
    watched = watch(folder, **options)
    if watched.is_on:
        tell_children(folder, options)
    try:
        (run_module if is_module else run_script)(command[0], command[1:])
    except BaseException as error:  # raised again
        watched.note_failure(error)
        raise
