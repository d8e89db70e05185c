"""`flopwatch init`: writes a YAML file with every setting of the monitor or of a sweep, for the user to edit."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from flopwatch.cli import argument, flag, say
from flopwatch.errors import InputError


def init(
    file: Annotated[
        Path | None,
        argument("The file to write. Default: flopwatch.yaml, or sweep.yaml.", "[FILE]"),
    ] = None,
    sweep: Annotated[bool, flag("Write the settings of a sweep instead of those of the monitor.", "--sweep")] = False,
    force: Annotated[bool, flag("Replace the file if it exists.", "--force")] = False,
) -> None:
    """Write a YAML file in which every setting is explained and has its default."""
    target = file or Path("sweep.yaml" if sweep else "flopwatch.yaml")
    try:
        with target.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(_template(sweep))
    except FileExistsError:
        raise InputError(f"{target} exists; name another file, or add --force to replace it") from None
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; name another file") from None
    name = shlex.quote(str(target))
    use = f"flopwatch sweep {name} --dry-run" if sweep else f"flopwatch run --config {name} train.py"
    say(f"Wrote {target}. Use it with: {use}")


_MONITOR_HEAD = """\
# Settings of flopwatch's monitor. Each has its default; remove the `#` before a setting to change it.
#   flopwatch run --config flopwatch.yaml train.py
#   flopwatch.TrainingMonitor("outputs", config="flopwatch.yaml")
flopwatch:
"""

_SWEEP_HEAD = """\
# The matrix of a sweep: every list is an axis, and every combination of their values is a trial. Each setting has its
# default; remove the `#` before a setting to change it.
#   flopwatch sweep sweep.yaml --dry-run    shows the trials
#   flopwatch sweep sweep.yaml              measures them
#   flopwatch report flopwatch-sweep        compares the results
"""


def _template(is_sweep: bool) -> str:
    if is_sweep:
        from flopwatch.sweep.spec.matrix import Matrix

        defaults = {name: field.default for name, field in Matrix.model_fields.items()}
        return _SWEEP_HEAD + _settings(Matrix.model_fields, defaults)
    from flopwatch.monitor.config import MonitorConfig

    defaults = MonitorConfig.model_validate({}).model_dump(mode="json")
    return _MONITOR_HEAD + _settings(MonitorConfig.model_fields, defaults, indent="  ")


def _settings(fields: dict[str, Any], defaults: dict[str, Any], indent: str = "") -> str:
    """A line for each field. The first of a sweep is not commented out, because a sweep needs one setting."""
    lines = []
    for name, field in fields.items():
        mark = "" if name == "trainer" else "#"
        comment = " ".join(filter(None, [field.description, _choices(field.annotation)]))
        lines.append(f"{indent}{mark}{_yaml(name, defaults[name]):<32}  # {comment}")
    return "\n".join(lines) + "\n"


def _yaml(name: str, value: Any) -> str:
    """A line of YAML.

    >>> _yaml("sinks", ["console"]), _yaml("batch_size", None)
    ('sinks: [console]', 'batch_size: null')
    """
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return f"{name}: {text.removesuffix('...' + chr(10)).strip()}"


def _choices(annotation: Any) -> str | None:
    """The values of a setting that has only a few.

    >>> _choices(Literal["full", "causal"])
    'One of: full, causal.'
    """
    return f"One of: {', '.join(get_args(annotation))}." if get_origin(annotation) is Literal else None
