"""`flopwatch run`: starts a training script and monitors it without changing it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flopwatch.cli import flag
from flopwatch.errors import InputError


class ScriptRequest(Exception):  # noqa: N818
    """Raised by `run` to leave typer, which would change how the script's exceptions end the process.

    Attributes:
        target: The script, or the name of the module.
        arguments: The script's own arguments.
        is_module: Whether `target` is a module.
        options: Arguments of `flopwatch.watch`.
    """

    def __init__(self, target: str, arguments: Sequence[str], is_module: bool, options: Mapping[str, Any]) -> None:
        super().__init__(target)
        self.target, self.arguments = target, arguments
        self.is_module, self.options = is_module, options


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT", help="The script, and after it the script's arguments.")
    ],
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
) -> None:
    """Run a training script unchanged, and show its FLOPs, MFU and rates on stderr."""
    from flopwatch.automatic.script import check_module, check_script

    if config is not None and not config.exists():
        raise InputError(f"there is no configuration file {config}; `flopwatch init {config}` writes one")
    (check_module if is_module else check_script)(command[0])
    given = {
        "output_dir": output_dir,
        "log_every": log_every,
        "sinks": [name for name in (sinks or "").split(",") if name] or None,
        "config": config,
        "peak_flops_per_s": None if peak_tflops is None else peak_tflops * 1e12,
        "dtype": dtype,
        "attention": attention,
        "quiet": quiet,
    }
    options = {name: value for name, value in given.items() if value is not None}
    raise ScriptRequest(command[0], command[1:], is_module, options)


def start(request: ScriptRequest) -> None:
    """Run the script; what it raises, `SystemExit` too, passes through."""
    from flopwatch.automatic.script import run_module, run_script
    from flopwatch.automatic.session import default_output_dir, watch

    options = dict(request.options)
    output_dir = options.pop("output_dir", None) or default_output_dir(request.target)
    watched = watch(output_dir.absolute(), **options)
    try:
        (run_module if request.is_module else run_script)(request.target, request.arguments)
    except BaseException:
        watched.has_failed = True
        raise
