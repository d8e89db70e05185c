"""Commands that do not load pydantic for values that need no conversion; uses undocumented names of typer 0.29.

typer 0.29 loads pydantic to convert the value of any option, even text into text or None into None. That doubles the
CPU time of a command: `flopwatch peak --name X` takes 390 ms instead of 185 ms, `flopwatch sweep --help` 320 ms instead
of 150 ms (median of 15 interleaved runs). The commands below return text and None unchanged, and leave numbers and
lists to typer.

The undocumented names are `get_runtime_param` and `type_descriptor` of a parameter. Without them, as before typer 0.29,
typer converts every value.
"""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

USAGE_ERRORS: tuple[type[Any], ...] = (typer.BadParameter.__base__ or typer.BadParameter,)
"""The class of all errors in the arguments of a command: click's UsageError, which typer does not export."""


def print_usage_error(error: Any) -> None:
    """Print in two lines what is wrong with the arguments, and the command that prints the help."""
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        error.show()
        return
    typer.secho(error.format_message(), fg="red", err=True)
    command = error.ctx.command_path if error.ctx is not None else "flopwatch"
    typer.echo(f"Run '{command} --help' to see its arguments and options.", err=True)


class LightCommand(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _lightened(super().get_params(ctx))


class LightGroup(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _lightened(super().get_params(ctx))


class _ConversionOnlyIfNeeded:
    def __init__(self, parameter: Any) -> None:
        self._full_conversion: Callable[[], Any] = parameter.get_runtime_param
        self._is_text = parameter.type_descriptor.annotation is str

    def coerce(self, value: Any, param: Any, ctx: typer.Context) -> Any:
        if value is None or (self._is_text and isinstance(value, str)) or value == param.default:
            return value
        return self._full_conversion().coerce(value, param=param, ctx=ctx)


def _lightened(parameters: Any) -> Any:
    for parameter in parameters:
        is_untouched = "get_runtime_param" not in vars(parameter)
        if is_untouched and hasattr(parameter, "get_runtime_param"):
            conversion = _ConversionOnlyIfNeeded(parameter)
            parameter.get_runtime_param = lambda conversion=conversion: conversion
    return parameters
