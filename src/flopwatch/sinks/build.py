"""Makes sinks from names, from `module:Class`, or takes ready-made objects."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from flopwatch.errors import InputError
from flopwatch.sinks.protocol import Sink

SINK_NAMES = ("console", "tensorboard", "wandb", "mlflow", "prometheus")


def build_sinks(
    wanted: Sequence[str | Sink], output_dir: Path, options: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Sink], dict[str, str]]:
    """Make the wanted sinks. Nothing is opened yet: a sink does that at its first record, in its thread.

    >>> sinks, failures = build_sinks(["console", "prometheus"], Path("outputs"), {"console": {}})
    >>> [sink.name for sink in sinks]
    ['console']
    >>> failures
    {'prometheus': "no port was given; pass one, such as options={'prometheus': {'port': 9477}}"}

    Args:
        wanted: Names of `SINK_NAMES`, `module:Class`, or objects with the methods of `Sink`.
        output_dir: The run's folder; sinks that write files put them there.
        options: Keyword arguments of the sinks made here, by the name in `wanted`.

    Returns:
        The sinks, and for each that could not be made the reason.

    Raises:
        InputError: There is no sink with that name.
    """
    sinks: list[Sink] = []
    failures: dict[str, str] = {}
    for want in wanted:
        if not isinstance(want, str):
            sinks.append(_checked(want))
            continue
        if want not in SINK_NAMES and ":" not in want:
            raise InputError(
                f"there is no sink {want!r}; use one of {', '.join(SINK_NAMES)}, a class as 'module:Class', or an "
                "object with the methods of flopwatch.sinks.protocol.Sink"
            )
        try:
            sinks.append(_make(want, output_dir, options.get(want, {})))
        except Exception as error:
            failures[want] = str(error) or type(error).__name__
    return sinks, failures


def _make(name: str, output_dir: Path, options: Mapping[str, Any]) -> Sink:
    """Loads only the module of the wanted sink; the sink loads its tracker's package at its first record."""
    if name == "console":
        from flopwatch.sinks.console import ConsoleSink

        return ConsoleSink(**options)
    if name == "tensorboard":
        from flopwatch.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(**{"log_dir": output_dir / "tensorboard", **options})
    if name == "wandb":
        from flopwatch.sinks.wandb import WandbSink

        return WandbSink(**{"output_dir": output_dir, **options})
    if name == "mlflow":
        from flopwatch.sinks.mlflow import MlflowSink

        return MlflowSink(**{"output_dir": output_dir, **options})
    if name == "prometheus":
        from flopwatch.sinks.prometheus import PrometheusSink

        if (
            "port" not in options
        ):  # no default, because 9400 and the next ports belong to other exporters of GPU machines
            raise InputError("no port was given; pass one, such as options={'prometheus': {'port': 9477}}")
        return PrometheusSink(**options)
    module, _, class_name = name.partition(":")
    return _checked(getattr(import_module(module), class_name)(**options))


def _checked(sink: Any) -> Sink:
    missing = [method for method in ("write", "flush", "close") if not callable(getattr(sink, method, None))]
    if missing or not isinstance(getattr(sink, "name", None), str):
        raise InputError(
            f"{sink!r} is no sink: it lacks {', '.join(missing) or 'a name'}; see flopwatch.sinks.protocol.Sink"
        )
    return cast("Sink", sink)
