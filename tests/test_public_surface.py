"""What users were told they can call, pass, set and read keeps working."""

import json
import re
from types import ModuleType
from typing import Any

import pytest

from support.public_surface import FROZEN, ROOT, collect, describe, find, to_text

OF_0_1_0 = json.loads((ROOT / "tests/data/public_surface_0_1_0.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def today() -> dict[str, Any]:
    return collect(ROOT)


def lost(before: Any, now: Any, where: str = "") -> list[str]:
    """What `before` has and `now` has not, as paths."""
    if isinstance(before, dict):
        if not isinstance(now, dict):
            return [where]
        missing = [f"{where}/{key}" for key in before if key not in now]
        inside = (lost(value, now[key], f"{where}/{key}") for key, value in before.items() if key in now)
        return missing + [path for paths in inside for path in paths]
    if where.endswith("/parameters") or "/methods/" in where:
        return [f"{where}: {problem}" for problem in _narrowed(before, now)]
    if isinstance(before, list):
        return [f"{where}/{item}" for item in before if item not in now]
    return []  # a constant may hold another value today


def _narrowed(before: list[str], now: list[str]) -> list[str]:
    """Calls that were right before and are not now: a parameter gone, moved, or new and required."""
    accepts_any = any(name.startswith("**") for name in now)
    names_before, names_now = ([name.rstrip("=") for name in names] for names in (before, now))
    problems = [f"{name} is gone" for name in names_before if name not in names_now and not accepts_any]
    problems += [f"{name} is required" for name in _required(now) if name not in names_before]
    problems += [f"{name} had a default" for name in _required(now) if f"{name}=" in before]
    by_position = _by_position(before)
    if by_position != _by_position(now)[: len(by_position)]:
        problems.append(f"positional parameters were {by_position}, are {_by_position(now)}")
    return problems


def _required(parameters: list[str]) -> list[str]:
    return [name for name in parameters if name != "*" and not name.startswith("*") and not name.endswith("=")]


def _by_position(parameters: list[str]) -> list[str]:
    """Without `type` and `format`: a record's class fixes them, so new fields may stand before them."""
    stars = [index for index, name in enumerate(parameters) if name.startswith("*")]
    names = [name.rstrip("=") for name in parameters[: stars[0] if stars else None]]
    return [name for name in names if name not in ("type", "format")]


def test_the_public_surface_is_the_frozen_one(today: dict[str, Any]) -> None:
    """Every change of a name, a parameter, a flag, a key or a metric shows here, and is then a decision."""
    assert to_text(today) == FROZEN.read_text(encoding="utf-8"), "python -m support.public_surface --update, in tests/"


def test_everything_importable_from_flopwatch_in_0_1_0_still_is(today: dict[str, Any]) -> None:
    assert lost(OF_0_1_0["names"], today["names"]) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dotted", sorted(OF_0_1_0["documented"]))
def test_every_documented_deep_import_of_0_1_0_still_works(dotted: str) -> None:
    before, now = OF_0_1_0["documented"][dotted], find(dotted)
    if isinstance(now, ModuleType):  # where its names are defined today does not matter
        assert lost(before, {name: describe(getattr(now, name)) for name in before if hasattr(now, name)}) == []
    else:
        assert lost(before, describe(now)) == []


def test_every_flag_of_0_1_0_is_still_understood(today: dict[str, Any]) -> None:
    understood = {name: [*flags, *today["old_flags"].get(name, {})] for name, flags in today["commands"].items()}

    assert lost(OF_0_1_0["commands"], understood) == []


@pytest.mark.parametrize("part", ["sweep_keys", "settings", "metrics", "words"])
def test_every_key_of_0_1_0_is_still_understood(part: str, today: dict[str, Any]) -> None:
    assert lost(OF_0_1_0[part], today[part]) == []


def test_every_spelling_of_0_1_0_means_the_same_setting(today: dict[str, Any]) -> None:
    spellings = today["settings"]["spellings"]

    assert {name: spellings.get(name) for name in OF_0_1_0["settings"]["spellings"]} == OF_0_1_0["settings"][
        "spellings"
    ]


def test_every_documented_environment_variable_of_0_1_0_is_read() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))

    assert [name for name in OF_0_1_0["environment"] if not re.search(rf"\b{name}\b", sources)] == []


@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        ({"a": {}}, {}, "/a"),
        (["--json"], ["--output"], "/--json"),
        ({"parameters": ["a", "b="]}, {"parameters": ["a"]}, "/parameters: b is gone"),
        ({"parameters": ["a"]}, {"parameters": ["a", "b"]}, "/parameters: b is required"),
        ({"parameters": ["a="]}, {"parameters": ["a"]}, "/parameters: a had a default"),
        ({"parameters": ["a", "b"]}, {"parameters": ["b", "a"]}, "/parameters: positional parameters were"),
    ],
)
def test_a_narrower_surface_is_noticed(before: Any, now: Any, problem: str) -> None:
    assert any(found.startswith(problem) for found in lost(before, now))
