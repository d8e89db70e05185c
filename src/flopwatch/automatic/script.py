"""Runs a script or a module as `python` would, in this process, and learns when a module has been imported."""

import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from flopwatch.errors import InputError


def check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        raise InputError(f"{target} is a folder; give a script, or a module with `flopwatch run -m {path.name}`")
    if not path.exists():
        is_name = "/" not in target and path.suffix != ".py"
        hint = f"for a module write `flopwatch run -m {target}`" if is_name else "give the path of your training script"
        raise InputError(f"there is no script {target!r} in {Path.cwd()}; {hint}")


def check_module(name: str) -> None:
    """Raise InputError if there is no such module; the parts of its package are not imported for that."""
    if name.endswith(".py"):
        raise InputError(f"{name!r} is a file and not the name of a module; write `flopwatch run {name}`")
    folder = str(Path.cwd())
    if PathFinder.find_spec(name.partition(".")[0], [folder, *sys.path]) is None:
        raise InputError(f"there is no module {name!r} in {folder} or in this environment; correct the name")


def run_script(target: str, arguments: Sequence[str]) -> None:
    """Run a file as `python target arguments…` does. What it raises, `SystemExit` too, passes through."""
    path = str(Path(target).absolute())
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    vars(main).update(__file__=path, __loader__=loader, __package__=None, __cached__=None, __builtins__=__builtins__)
    sys.argv = [target, *arguments]
    _set_first_path(str(Path(path).resolve().parent))
    sys.modules["__main__"] = main
    _hide_own_frames(is_module=False)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as `python -m name arguments…` does. What it raises, `SystemExit` too, passes through."""
    sys.argv = [name, *arguments]
    _set_first_path(str(Path.cwd()))
    _hide_own_frames(is_module=True)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str) -> None:
    """Python puts the script's folder first. Until now it is that of the command `flopwatch`."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _hide_own_frames(*, is_module: bool) -> None:
    """Print an uncaught exception's traceback from the script on, as `python` does; a hook set later is used as it is.

    The frames of a module come after those of `runpy`.
    """
    show = sys.excepthook

    def show_from_script(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown = _from_script(traceback, is_module)
        show(kind, error.with_traceback(shown), shown)

    sys.excepthook = show_from_script


def _from_script(traceback: TracebackType | None, is_module: bool) -> TracebackType | None:
    here = traceback
    while here is not None and here.tb_frame.f_code.co_filename != __file__:
        here = here.tb_next
    rest = here.tb_next if here is not None else None
    while rest is not None and is_module and "runpy" in rest.tb_frame.f_code.co_filename:
        rest = rest.tb_next
    return rest if here is not None else traceback


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
