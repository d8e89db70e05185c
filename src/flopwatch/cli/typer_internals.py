"""typer commands that do not load pydantic to read text.

typer 0.29 loads pydantic to convert any value of an option, even text into text and nothing into nothing, which makes
a command take twice as long to start. Here a value that needs no conversion is not converted; numbers and lists still
go typer's way. Other versions of typer have no such step and are left alone.
"""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class LightCommand(TyperCommand):
    """A command that starts quickly."""

    def get_params(self, ctx: Any) -> Any:
        return _lightened(super().get_params(ctx))


class LightGroup(TyperGroup):
    """A group of commands that starts quickly."""

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
