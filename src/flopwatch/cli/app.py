"""The commands of `flopwatch`. A command's file is imported when the command is used, so that `--help` stays quick.

The signature of a command's function declares its arguments and options: `Annotated[int, flag("Samples per step.")]`.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from flopwatch.version import __version__

# The overview in `flopwatch --help` cuts lines of more than 64 characters.
_COMMANDS = {
    "run": ("run", "Run a training script unchanged and measure it."),
    "watch": ("run_logs.watch", "Watch a run in the terminal until it ends."),
    "why": ("run_logs.analyse", "Show where the rest of the peak went, and what to try next."),
    "trace": ("run_logs.traces", "Trace a few steps of a run and print the use of their time."),
    "explain": ("run_logs.analyse", "Print how a logged MFU was calculated."),
    "compare": ("run_logs.analyse", "Compare step time, rates and MFU of two runs."),
    "flops": ("declared", "Count the FLOPs of one training step, by module."),
    "peak": ("peak", "Print the peak FLOP/s of a device."),
    "sweep": ("trials", "Measure every trial of a matrix, each in its own process."),
    "trial": ("trials", "Measure one trial in a separate process."),
    "fit": ("trials", "Find the largest batch size that fits in memory."),
    "report": ("declared", "Print the results of a sweep, or export the rows of a run."),
    "init": ("init", "Write a YAML file in which every setting is explained."),
    "doctor": ("doctor", "Check that all works on this machine, and name what is missing."),
}
"""The module in `flopwatch.cli` that has a function of the command's name, and the line in `flopwatch --help`."""
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # click's own order is that of the alphabet


class Command(click.Command):
    """A command whose file is imported when its arguments are read."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        # Options after the script's name belong to the script.
        super().__init__(name, {**_HELP, "allow_interspersed_args": name != "run"}, short_help=summary)
        self._module = module

    def load(self) -> None:
        self.callback = getattr(import_module(f"flopwatch.cli.{self._module}"), str(self.name))
        self.help = inspect.getdoc(self.callback)
        self.params = [_parameter(each) for each in inspect.signature(self.callback).parameters.values()]

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        self.load()
        return super().make_context(*arguments, **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
            of_kind = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, kind)]
            records = [record for parameter in of_kind if (record := parameter.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Argument(click.Argument):
    """An argument with a help text, which click has only from 8.5 on."""

    def __init__(self, name: str, text: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.text = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return str(self.metavar), f"{self.text}  [required]" if self.required else self.text


def _parameter(parameter: inspect.Parameter) -> click.Parameter:
    """The argument or option of `seq_len: Annotated[int | None, flag("Sequence length.")] = None`."""
    annotation, declared = get_args(parameter.annotation)
    kind = next((each for each in get_args(annotation) if get_origin(annotation) is not list), annotation)
    is_list, is_required = get_origin(kind) is list, parameter.default is parameter.empty
    settings: dict[str, Any] = {
        "type": click.Path(path_type=Path) if kind is Path else str if is_list else kind,
        "required": is_required,
        "callback": (lambda ctx, parameter, values: list(values) or None) if is_list else None,
        "metavar": declared.metavar,
    }
    if not is_required and not is_list:
        settings["default"] = parameter.default
    if declared.is_argument:
        settings["nargs"] = -1 if is_list else 1
        settings["shell_complete"] = lambda ctx, parameter, incomplete: [CompletionItem(incomplete, type="file")]
        return _Argument(parameter.name, declared.text, **settings)
    names = declared.names or (f"--{parameter.name.replace('_', '-')}",)
    if kind is bool:
        settings |= {"is_flag": True, "type": None}
    else:
        settings["metavar"] = declared.metavar or f"<{'list[str]' if is_list else kind.__name__.lower()}>"
        settings["multiple"] = is_list
    has_default = not is_required and parameter.default is not None and parameter.default is not False
    return click.Option([parameter.name, *names], help=declared.text, show_default=has_default, **settings)


def _print_version(ctx: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"flopwatch {__version__}")
        ctx.exit()


app = _Commands(
    "flopwatch",
    help="Count the FLOPs of PyTorch training steps exactly, and measure how much of the hardware they use.",
    commands={name: Command(name, module, summary) for name, (module, summary) in _COMMANDS.items()},
    no_args_is_help=True,
    context_settings=_HELP,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and exit.",
        )
    ],
)
