"""Collects the public surface of the installed flopwatch as data: names, parameters, flags, keys.

`python -m support.public_surface ROOT` prints it as JSON; ROOT is the checkout whose docs name the deep imports.
`python -m support.public_surface --update`, in `tests/`, writes the frozen list of `tests/test_public_surface.py` anew.
"""

import ast
import builtins
import dataclasses
import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
FROZEN = ROOT / "tests/data/public_surface.json"
PACKAGES = [
    f"flopwatch.{name}"
    for name in ("flops", "hardware", "models", "monitor", "records", "report", "runs", "sinks", "sweep")
]
ENVIRONMENT = re.compile(r"\bFLOPWATCH_[A-Z_]+\b")
REFERENCE = re.compile(r"^::: (flopwatch[\w.]*)", re.MULTILINE)
DEEP_IMPORT = re.compile(r"^\s*from (flopwatch\.[\w.]+) import ([\w, ]+)", re.MULTILINE)
DOTTED = re.compile(r"`(flopwatch\.[a-z_]+(?:\.\w+)+)")


def collect(root: Path) -> dict[str, Any]:
    """The surface of the flopwatch that is imported; `root` holds the documents that name parts of it."""
    import flopwatch

    pages = _pages(root)
    return {
        "names": {name: _described(flopwatch, name) for name in sorted(flopwatch.__all__)},
        "packages": {name: sorted(find(name).__all__) for name in PACKAGES if _exists(f"{name}.__all__")},
        "documented": {name: describe(find(name)) for name in documented_names(pages)},
        "commands": _commands(),
        "sweep_keys": _sweep_keys(),
        "settings": _settings(),
        "metrics": sorted(_metrics()),
        "environment": sorted({name for text in pages.values() for name in ENVIRONMENT.findall(text)}),
        "words": _words(),
    }


def _described(package: ModuleType, name: str) -> Any:
    """A public name; of a sub-package only that it is one, since "packages" lists its names."""
    found = getattr(package, name)
    return "module" if isinstance(found, ModuleType) else describe(found)


def documented_names(pages: dict[str, str]) -> list[str]:
    """Modules and names below `flopwatch` that a page mentions, shows in an import, or has in the reference."""
    found = set()
    for text in pages.values():
        found.update(REFERENCE.findall(text))
        found.update(DOTTED.findall(text))
        for module, names in DEEP_IMPORT.findall(text):
            found.update(f"{module}.{name.strip()}" for name in names.split(","))
    return sorted(name for name in found if _exists(name))


def find(dotted: str) -> Any:
    """The module or object of this dotted name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(str(error.name)):
                raise
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def describe(found: Any) -> Any:
    """A module's public names, a class's parameters and members, a function's parameters; otherwise the type."""
    if isinstance(found, ModuleType):
        return {name: describe(value) for name, value in sorted(vars(found).items()) if _is_own(found, name, value)}
    if inspect.isclass(found) and not isinstance(found, GenericAlias):  # an alias is a class too on Python 3.10
        members = [name for name in dir(found) if not name.startswith("_") and name not in _of_others(found)]
        members += getattr(found, "model_fields", {})
        members += [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
        shown = {
            name: parameters(getattr(found, name))
            for name in sorted(set(members) - _OF_PYDANTIC)
            if inspect.isroutine(getattr(found, name, None))
        }
        return {"parameters": parameters(found), "attributes": sorted(set(members) - _OF_PYDANTIC), "methods": shown}
    if inspect.isroutine(found):
        return {"parameters": parameters(found)}
    return type(found).__name__


def _of_others(found: type) -> set[str]:
    """Members of exceptions and of other packages' classes that this class only inherits: they change with releases."""
    ours = [base for base in found.__mro__ if base is found or base.__module__.partition(".")[0] == "flopwatch"]
    others = [base for base in found.__mro__ if base not in ours and not hasattr(builtins, base.__name__)]
    inherited = {name for base in (ImportError, *others) for name in dir(base)}
    return inherited - {name for base in ours for name in vars(base)}


def to_text(surface: dict[str, Any]) -> str:
    return json.dumps(surface, indent=1, sort_keys=True) + "\n"


def parameters(function: Any) -> list[str]:
    """Such as `["model", "batch", "*", "loss_fn="]`; a name with `=` has a default."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    shown, is_keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            shown.append("*")
        is_keyword_only = is_keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{star}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return shown


def _pages(root: Path) -> dict[str, str]:
    files = [*root.glob("README*.md"), *root.glob("docs/*.md"), *root.glob("examples/*.py")]
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(files)}


def _exists(dotted: str) -> bool:
    try:
        find(dotted)
    except (ModuleNotFoundError, AttributeError):
        return False
    return True


def _is_own(module: ModuleType, name: str, value: Any) -> bool:
    """Whether the module lists or defines this public name."""
    if name.startswith("_") or isinstance(value, ModuleType):
        return False
    if hasattr(module, "__all__"):
        return name in module.__all__
    return getattr(value, "__module__", None) == module.__name__ or name in _constants(module)


def _constants(module: ModuleType) -> set[str]:
    """Names that the module assigns itself: numbers and texts do not know where they come from."""
    targets: list[ast.expr] = []
    for node in ast.parse(inspect.getsource(module)).body:
        targets += node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _commands() -> dict[str, list[str]]:
    from flopwatch.cli.app import app

    commands: dict[str, Any] = {"": app, **app.commands}
    for name in app.commands:
        commands[name].load()
    return {
        name: sorted(
            spelling
            for parameter in command.params
            for spelling in (*parameter.opts, *parameter.secondary_opts)
            if spelling.startswith("-") and spelling != "--help"
        )
        for name, command in sorted(commands.items())
    }


def _sweep_keys() -> dict[str, list[str]]:
    matrix, trainer = (find(f"flopwatch.sweep.spec.matrix.{name}") for name in ("Matrix", "TrainerEntry"))
    return {
        "": sorted([*matrix.model_fields, *find("flopwatch.spellings.SWEEP")]),
        "trainer": sorted(trainer.model_fields),
    }


def _settings() -> dict[str, Any]:
    config = find("flopwatch.monitor.config")
    return {
        "settings": sorted(config.MonitorConfig.model_fields),
        "spellings": dict(sorted(find("flopwatch.spellings.MONITOR").items())),
        "presets": sorted(config.PRESETS),
    }


def _metrics() -> list[str]:
    metrics = find("flopwatch.records.metrics")
    return [*metrics.METRICS, *(metric.key for metric in metrics._OF_DATASETS.values()), metrics.STEP_KEY]


def _words() -> dict[str, list[str]]:
    from typing import get_args

    return {
        "outcomes": sorted(get_args(find("flopwatch.records.trial.Outcome"))),
        "modes": sorted(get_args(find("flopwatch.monitor.config.ModeName"))),
    }


_OF_PYDANTIC = set(dir(import_module("pydantic").BaseModel))

if __name__ == "__main__":
    if sys.argv[1] == "--update":
        FROZEN.write_text(to_text(collect(ROOT)), encoding="utf-8")
    else:
        sys.stdout.write(to_text(collect(Path(sys.argv[1]))))
