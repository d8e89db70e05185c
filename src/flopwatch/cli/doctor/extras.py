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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from flopwatch.cli.doctor.findings import Part
from flopwatch.clock import monotonic_seconds
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
    """Imports the modules of the installed extras in another process; `errors_of` waits for its answers."""

    def __init__(self, extras: tuple[Extra, ...] = EXTRAS, seconds: float = 120.0) -> None:
        self._seconds = seconds
        self._modules = [module for extra in extras if _is_complete(extra) for module in extra.modules]
        self._started = _Importing(self._modules) if self._modules else None
        self._errors: dict[str, str] = {}
        self._unanswered: list[str] = []

    def errors_of(self, extra: Extra) -> list[str]:
        """Why modules of an extra cannot be imported."""
        self._wait()
        return [self._errors[module] for module in extra.modules if module in self._errors]

    def is_known(self, extra: Extra) -> bool:
        """False if the time was too short to import all modules of an extra."""
        self._wait()
        return not any(module in self._unanswered for module in extra.modules)

    def _wait(self) -> None:
        importing, left, until = self._started, self._modules, monotonic_seconds() + self._seconds
        self._started = None
        while importing is not None:
            status = importing.end(until)
            answers = importing.answers()
            self._errors |= {name: error for name, error in answers.items() if error}
            left, importing = [name for name in left if name not in answers], None
            if status is None:
                self._unanswered = left
            elif left:
                by_signal = f"importing it ended the process by signal {-status}"
                self._errors[left.pop(0)] = (
                    by_signal if status < 0 else f"importing it ended the process with status {status}"
                )
                importing = _Importing(left) if left else None


class _Importing:
    """A process that imports modules one after the other, and writes the answers to a file.

    A pipe would stay open as long as a server that an import has started.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `answers` closes it
        # The folder of the user may have files or folders that are named like a package, such as `wandb`.
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _IMPORT, *modules],
            cwd=tempfile.gettempdir(),
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.DEVNULL,
        )

    def end(self, until: float) -> int | None:
        """The status of the process; None if it had to be ended at this time."""
        try:
            return self._process.wait(max(until - monotonic_seconds(), 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    def answers(self) -> dict[str, str]:
        """The error of each module that was tried, in one line; empty if it could be imported."""
        with self._said:
            self._said.seek(0)
            lines = [line.removeprefix(_MARK) for line in self._said if line.startswith(_MARK)]
        return {name: one_line(error, _LONGEST_MESSAGE) for name, error in map(json.loads, lines)}


_MARK = "flopwatch-import "
_IMPORT = f"""
import importlib, json, os, sys
for names in sys.argv[1:]:
    error = ""
    for name in names.split("|"):
        try:
            importlib.import_module(name)
            error = ""
            break
        except BaseException as raised:
            error = error or f"{{type(raised).__name__}}: {{raised}}"
    print("\\n" + {_MARK!r} + json.dumps([names, error]), flush=True)
os._exit(0)  # without waiting for threads of the packages
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
    if errors := imports.errors_of(extra):
        command = extra.command.replace("install", "install --upgrade --force-reinstall")
        return Part(extra.name, "broken", f"cannot be imported: {errors[0]}", command, extra.use)
    if not imports.is_known(extra):
        said = "its import was not over in time, so it is not known whether it works"
        return Part(extra.name, "unusable", said, use=extra.use)
    versions = [str(own) if len(found) == 1 else f"{names} {own}" for names, own in found.items()]
    return Part(extra.name, "there", ", ".join(versions), use=extra.use)


def find_extras(imports: Imports) -> list[Part]:
    return [part_of(extra, imports) for extra in EXTRAS]
