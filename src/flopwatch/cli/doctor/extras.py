"""The extras of flopwatch: which are installed, in which version, and whether they can be imported. Never loads torch.

Importing the packages is the only sure test of an installation, but a broken one may print, hang or end the process.
Therefore another process imports them, while this one looks at the machine.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from flopwatch.cli.doctor.findings import Part
from flopwatch.text import one_line

_LONGEST_MESSAGE = 160


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of pyproject.toml.

    Attributes:
        packages: The packages that it installs, with the lowest version that flopwatch works with. Of several names
            joined by `|`, one is enough.
        modules: What flopwatch imports of them.
        use: What it is for.
    """

    name: str
    packages: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    use: str

    @property
    def command(self) -> str:
        return f'pip install "flopwatch[{self.name}]"'


EXTRAS = (
    Extra("tensorboard", (("tensorboard", "2.17.1"),), ("torch.utils.tensorboard",), "sink"),
    Extra("wandb", (("wandb", "0.31"),), ("wandb",), "sink"),
    Extra("mlflow", (("mlflow-skinny|mlflow", "2.17"),), ("mlflow",), "sink"),
    Extra("prometheus", (("prometheus-client", "0.20"),), ("prometheus_client",), "sink"),
    Extra(
        "hf",
        (("transformers", "4.57"), ("accelerate", "1.4"), ("trl", "0.24")),
        ("transformers", "accelerate", "trl"),
        "Hugging Face",
    ),
    Extra("lightning", (("lightning|pytorch-lightning", "2.4"),), ("lightning|pytorch_lightning",), "callback"),
    Extra("dp", (("opacus", "1.6"),), ("opacus",), "private training"),
    Extra("ray", (("ray", "2.40"),), ("ray",), "sweeps on Ray"),
    Extra("nvml", (("nvidia-ml-py", "12.535"),), ("pynvml",), "NVIDIA counters"),
)


def installed_version(names: str) -> str | None:
    """The version of the first of these packages that is installed; None without one."""
    for name in names.split("|"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_older(found: str, lowest: str) -> bool:
    """Whether a version is below another one, by its numbers.

    >>> is_older("2.9.1", "2.17.1"), is_older("1.6.0rc1", "1.6"), is_older("2.13.0+cpu", "2.6")
    (True, False, False)
    """
    own, other = (tuple(map(int, re.findall(r"\d+", re.split(r"[+a-zA-Z]", text)[0]))) for text in (found, lowest))
    return own < other


class Imports:
    """Imports the modules of the installed extras in another process; `error_of` waits for its answer."""

    def __init__(self, extras: tuple[Extra, ...] = EXTRAS, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._errors: dict[str, str] | None = None
        self._modules = [module for extra in extras if _is_complete(extra) for module in extra.modules]
        self._process = None
        if self._modules:
            # The folder of the user may have files or folders that are named like a package, such as `wandb`.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _IMPORT, *self._modules],
                cwd=tempfile.gettempdir(),
                env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def error_of(self, module: str) -> str | None:
        """Why a module cannot be imported; None if it can, or if the time was too short to find out."""
        if self._errors is None:
            self._errors = dict(self._answers())
        return self._errors.get(module)

    def _answers(self) -> Iterator[tuple[str, str]]:
        if self._process is None:
            return
        try:
            said, _ = self._process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        answered = set()
        for line in said.splitlines():
            if line.startswith(_MARK):
                name, error = json.loads(line.removeprefix(_MARK))
                answered.add(name)
                if error:
                    yield name, one_line(error, _LONGEST_MESSAGE)
        ended_by = -self._process.returncode
        if ended_by > 0 and ended_by != 9 and (left := [name for name in self._modules if name not in answered]):
            yield left[0], f"importing it ended the process by signal {ended_by}"


_MARK = "flopwatch-import "
_IMPORT = f"""
import importlib, json, sys
for names in sys.argv[1:]:
    error = ""
    for name in names.split("|"):
        try:
            importlib.import_module(name)
            error = ""
            break
        except BaseException as raised:
            error = error or f"{{type(raised).__name__}}: {{raised}}"
    print({_MARK!r} + json.dumps([names, error]), flush=True)
"""


def _is_complete(extra: Extra) -> bool:
    return all(installed_version(names) for names, _ in extra.packages)


def part_of(extra: Extra, imports: Imports) -> Part:
    found = {names: installed_version(names) for names, _ in extra.packages}
    missing = [names.partition("|")[0] for names, own in found.items() if own is None]
    if missing:
        others = [names for names, own in found.items() if own is not None]
        said = f"not installed: {', '.join(missing)}" if others else ""
        return Part(extra.name, "missing", said, extra.command, extra.use)
    for names, lowest in extra.packages:
        own = found[names]
        if own is not None and is_older(own, lowest):
            said = f"{names.partition('|')[0]} {own} is older than {lowest}, the oldest that flopwatch supports"
            command = extra.command.replace("install", "install --upgrade")
            return Part(extra.name, "broken", said, command, extra.use)
    errors = [error for module in extra.modules if (error := imports.error_of(module))]
    if errors:
        command = extra.command.replace("install", "install --upgrade --force-reinstall")
        return Part(extra.name, "broken", f"cannot be imported: {errors[0]}", command, extra.use)
    versions = [str(own) if len(found) == 1 else f"{names} {own}" for names, own in found.items()]
    return Part(extra.name, "there", ", ".join(versions), use=extra.use)


def find_extras(imports: Imports) -> list[Part]:
    return [part_of(extra, imports) for extra in EXTRAS]
