"""Calls a function as soon as a module has been imported, without importing it earlier than the program does.

A script may set environment variables before it imports torch, so flopwatch must not import torch first.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action`, which must not raise, now if the module is loaded, otherwise right after its import.

    Returns a function that cancels it.

    >>> done = []
    >>> cancel = when_imported("sys", lambda: done.append("sys"))
    >>> done
    ['sys']
    """
    finder = _Finder(name, action)
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, finder)
    return finder.cancel


class _Finder:
    """Finds one module as usual, and lets its loader call `action` when the module's code has run."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action
        self._is_searching = False

    def cancel(self) -> None:
        self._action = lambda: None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            del loader.exec_module  # the instance's attribute, so that the loader is as before
            action = self._action
            self.cancel()
            execute(module)
            action()

        loader.exec_module = execute_and_act
        return spec
