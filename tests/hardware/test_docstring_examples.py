import doctest
from importlib import import_module

import pytest

MODULES = [
    "hardware.compute_dtype",
    "hardware.cpu_peak",
    "hardware.derive",
    "hardware.device",
    "hardware.dtypes",
    "hardware.matmul_search",
    "hardware.measure",
    "hardware.peaks",
    "hardware.resolve",
    "testing",
]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_are_true(module):
    result = doctest.testmod(import_module(f"flopwatch.{module}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
