"""Every test of the monitor starts in a process in which nothing was compiled: else steps would be told as compiled."""

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_was_compiled():
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
