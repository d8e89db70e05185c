"""The house has one of each thing, or at least not more than it had; a copy of any of them is found."""

import ast
from pathlib import Path

import pytest

from house.one_of_each import Module, import_cycles, imports_in_functions, places, read_modules
from house.weight import kinds_of_lines

MOST = {
    "parsers of `/proc/PID/stat`": 1,
    "validators of JSON, besides pydantic": 1,
    "followers of JSON lines": 1,
    "thinners of curves": 1,
    "drawings of a waterfall": 3,
    "vocabularies of time": 1,
    "statistics of a difference": 1,
}
"""Whoever removes a copy lowers its number; the aim is 1, and for drawings 1 in each medium."""
MOST_CYCLES = 0
MOST_IMPORTS_IN_FUNCTIONS = 67
COPIES = {
    "parsers of `/proc/PID/stat`": 'fields = Path(f"/proc/{pid}/stat").read_text().split()',
    "validators of JSON, besides pydantic": "def read(kind, content):\n    hints = get_type_hints(kind)",
    "followers of JSON lines": "def poll(self):\n    stream.seek(self._offset)",
    "thinners of curves": "points = [mean(points[start : start + 2]) for start in range(0, len(points), 2)]",
    "drawings of a waterfall": "def rows(waterfall: Waterfall) -> list[str]:\n    return list(waterfall.losses)",
    "vocabularies of time": 'NAMES = {"input_wait": "a", "eval": "b", "checkpoint": "c", "restart": "d"}',
    "statistics of a difference": "def is_slower(low: float, high: float) -> bool:\n    return low > 0.02",
}


@pytest.fixture(scope="module")
def modules():
    return read_modules(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def found(modules):
    return places(modules)


def module(text, name="flopwatch.new"):
    return Module(name, text, ast.parse(text), text.splitlines())


@pytest.mark.parametrize("what", MOST)
def test_no_second_one_has_come(found, what):
    assert len(found[what]) <= MOST[what], found[what]


@pytest.mark.parametrize("what", COPIES)
def test_a_copy_is_found(what):
    assert {kind for kind, found in places([module(COPIES[what])]).items() if found} == {what}


def test_no_import_cycle_has_come(modules):
    assert len(import_cycles(modules)) <= MOST_CYCLES, import_cycles(modules)
    assert imports_in_functions(modules) <= MOST_IMPORTS_IN_FUNCTIONS


def test_a_cycle_through_a_function_is_found_and_one_for_type_checking_is_not():
    one = module("def f():\n    import flopwatch.b", "flopwatch.a")
    other = module("from flopwatch.a import f", "flopwatch.b")
    typed = module("if TYPE_CHECKING:\n    from flopwatch.a import f", "flopwatch.b")
    assert import_cycles([one, other]) == [["flopwatch.a", "flopwatch.b"]]
    assert import_cycles([one, typed]) == []


def test_each_line_is_of_one_kind():
    text = '"""Says\n\nit."""\n\n# why\nx = 1  # not a comment line\n"""Of x."""\n'
    assert kinds_of_lines(module(text)) == {"docstring": 4, "blank": 1, "comment": 1, "code": 1}
