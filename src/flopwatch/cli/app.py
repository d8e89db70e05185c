"""The commands of `flopwatch`, and the checks of `flopwatch selftest`.

Every command imports heavy packages inside its functions, so that `--help` stays quick.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from flopwatch.cli.flops import flops, peak
from flopwatch.cli.init import init
from flopwatch.cli.report import report
from flopwatch.cli.run import run
from flopwatch.cli.run_logs.compare import compare
from flopwatch.cli.run_logs.explain import explain
from flopwatch.cli.run_logs.traces import trace
from flopwatch.cli.run_logs.watch import watch
from flopwatch.cli.run_logs.why import why
from flopwatch.cli.trials.sweep import sweep
from flopwatch.cli.trials.trial import fit, trial
from flopwatch.cli.typer_internals import LightCommand, LightGroup
from flopwatch.clock import monotonic_seconds
from flopwatch.version import __version__

if TYPE_CHECKING:
    import torch

    from flopwatch.monitor.training_monitor import TrainingMonitor

_STEPS = 40
_BATCH_SIZE, _SEQ_LEN = 4, 64


def selftest() -> None:
    """Check on this machine that FLOPs are counted correctly and that monitoring is cheap; takes ten seconds."""
    failed = 0
    for name, check in {
        "FLOPs of a known layer": _check_count,
        "monitored training": _check_monitor,
        "cost of monitoring": _check_cost,
    }.items():
        try:
            passed, detail = check()
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        failed += not passed
        typer.echo(f"{'ok  ' if passed else 'FAIL'}  {name}: {detail}")
    if failed:
        raise typer.Exit(1)


def _check_count() -> tuple[bool, str]:
    """Check a linear layer's FLOPs: 2 x samples x inputs x outputs forward, and as many for the weights' gradient."""
    import torch

    from flopwatch.flops.count import count_flops

    counted = count_flops(torch.nn.Linear(64, 32), torch.randn(8, 64)).model_flops
    expected = 2 * (2 * 8 * 64 * 32)
    return counted == expected, f"{counted:,} counted, {expected:,} by hand"


def _check_monitor() -> tuple[bool, str]:
    """Check that parameters are bitwise equal with and without the monitor, and that the monitor's FLOPs are right."""
    import tempfile

    import torch

    from flopwatch.flops.count import count_flops
    from flopwatch.monitor.training_monitor import TrainingMonitor

    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, strict=True, peak_flops_per_s=1e12, quiet=True)
        with monitor:
            watched, _ = _train(monitor)
        bare, _ = _train(None)
    equal = all(torch.equal(a, b) for a, b in zip(watched.parameters(), bare.parameters(), strict=True))
    expected = count_flops(bare, _batch()).model_flops * _STEPS
    total = monitor.summary.values.get("total/model_flops") if monitor.summary else None
    detail = f"{_STEPS} steps, {total:,} FLOPs, parameters {'bitwise equal' if equal else 'CHANGED'} with and without"
    return equal and total == expected, detail


def _check_cost() -> tuple[bool, str]:
    """Check that the monitor takes less than 5 % of the step time."""
    import tempfile
    from statistics import median

    from flopwatch.monitor.training_monitor import TrainingMonitor

    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, peak_flops_per_s=1e12, quiet=True) as monitor:
        _, seconds = _train(monitor)
        own = (monitor.own_seconds + monitor.thread_cpu_seconds) / _STEPS
    step_seconds = median(seconds)
    return own / step_seconds < 0.05, f"{1e6 * own:.0f} µs per step of {1e3 * step_seconds:.1f} ms"


def _batch() -> "dict[str, torch.Tensor]":
    import torch

    ids = torch.arange(_BATCH_SIZE * _SEQ_LEN).reshape(_BATCH_SIZE, _SEQ_LEN) % 1000
    return {"input_ids": ids, "labels": ids}


def _train(monitor: "TrainingMonitor | None") -> "tuple[torch.nn.Module, list[float]]":
    """Train a tiny model. Returns the model, and the seconds of each step without the monitor's own time."""
    import torch

    from flopwatch.models.load import load_model

    seconds: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = load_model("tiny", device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if monitor is not None:
            monitor.set_model(model)
        for number in range(_STEPS):
            began = monotonic_seconds()
            batch = _batch()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(monotonic_seconds() - began)
            if monitor is not None:
                monitor.log_step(number, 0, loss, None, 1e-3, batch=batch)
    return model, seconds


app = typer.Typer(
    name="flopwatch",
    cls=LightGroup,
    help="Count the FLOPs of PyTorch training steps exactly, and measure how much of the hardware they use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help drawn with rich takes twice as long
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The overview in `flopwatch --help` cuts lines of more than 64 characters.
_COMMANDS: dict[Callable[..., None], str] = {
    run: "Run a training script unchanged and measure it.",
    watch: "Watch a run in the terminal until it ends.",
    why: "Show where the rest of the peak went, and what to try next.",
    trace: "Trace a few steps of a run and print the use of their time.",
    explain: "Print how a logged MFU was calculated.",
    compare: "Compare step time, rates and MFU of two runs or two sweeps.",
    flops: "Count the FLOPs of one training step, by module.",
    peak: "Print the peak FLOP/s of a device.",
    sweep: "Measure every trial of a matrix, each in its own process.",
    trial: "Measure one trial in a separate process.",
    fit: "Find the largest batch size that fits in memory.",
    report: "Print the results of a sweep, or export the rows of a run.",
    init: "Write a YAML file in which every setting is explained.",
    selftest: "Check that counting and monitoring work on this machine.",
}
_HELP = {"help_option_names": ["-h", "--help"]}
for _command, _summary in _COMMANDS.items():
    # Options after the script's name belong to the script.
    _settings = {**_HELP, "allow_interspersed_args": False} if _command is run else _HELP
    app.command(_command.__name__, cls=LightCommand, short_help=_summary, context_settings=_settings)(_command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"flopwatch {__version__}")
        raise typer.Exit


@app.callback()
def _flopwatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
