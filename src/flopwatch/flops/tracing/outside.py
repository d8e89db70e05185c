"""Replaces what a model's code reaches by name, for the time of a run that is counted.

A global list, a counter of a class or a variable of an enclosing function is no part of the model, so a copy of the
model still writes to it. Therefore the code of the model is read: the names of globals and attributes that it uses are
bound to copies in the run, and to the originals again after it. Of installed packages, only the code of those that
define modules of the model is read, except of well-known libraries.
"""

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from flopwatch.errors import FlopwatchError

# Libraries that define modules, but keep nothing of a run in globals.
_KEEP_NOTHING = """
accelerate apex composer deepspeed diffusers flash_attn flopwatch lightning lightning_fabric liger_kernel numpy opacus
peft pytorch_lightning sentence_transformers timm torch torchao torchaudio torchmetrics torchvision transformers triton
trl xformers
"""
_LIBRARIES = {*sys.stdlib_module_names, *_KEEP_NOTHING.split()}
# Methods that run without being named by other code of the model.
_CALLED_BY_TORCH = {"forward", "backward", "setup_context"}
_USE_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_MISSING = object()


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    texts = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    attributes = {*code.co_names, *texts}  # texts, because of `getattr(module, "name")`
    used = {str(step.argval) for step in dis.get_instructions(code) if step.opname in _USE_GLOBAL}
    if "globals" in used:
        used |= texts
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            used |= names_in(inner)[0]
            attributes |= names_in(inner)[1]
    return frozenset(used), frozenset(attributes)


class Outside:
    """Finds what the code of a model reaches by name, and replaces it by copies while the code runs.

    `value` returns the copy of an object, and calls `add` for the functions and classes that it meets.
    """

    def __init__(self, value: Callable[[Any], Any]) -> None:
        self._value = value
        self._names = set(_CALLED_BY_TORCH)
        self._seen: dict[int, Any] = {}
        self._waiting: list[FunctionType] = []
        self._packages: set[str] = set()
        """Installed packages that define modules of the model."""
        self._classes: list[type] = []
        self._bound: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        self._undo: list[Callable[[], None]] = []

    def _is_followed(self, module: str | None) -> bool:
        package = (module or "").partition(".")[0]
        path = getattr(sys.modules.get(package), "__file__", None) or ""
        is_installed = "site-packages" in path or "dist-packages" in path
        return package in self._packages or (package not in _LIBRARIES and not is_installed)

    def add(self, value: Any) -> None:
        if isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, FunctionType) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._waiting.append(value)

    def add_class(self, cls: type) -> None:
        for each in cls.__mro__:
            package, is_module = each.__module__.partition(".")[0], hasattr(each, "register_forward_hook")
            if is_module and package not in _LIBRARIES:
                self._packages.add(package)
            if each not in self._classes and self._is_followed(package):
                self._classes.append(each)
                self._undo.append(functools.partial(_restore, each, dict(vars(each))))
                # A module is made before the run, and what its `__init__` reaches may be large.
                made_before = "__init__" if is_module else None
                for name in vars(each):
                    if name in self._names or (name.startswith("__") and name != made_before):
                        self._attribute(each, name)

    def add_names(self, namespace: dict[str, Any]) -> None:
        """Replace all entries of the attributes of an object that cannot be copied itself."""
        self._undo.append(functools.partial(_restore, namespace, dict(namespace)))
        for name in list(namespace):
            self._bind(namespace, name)

    def cached(self, function: Any) -> Any:
        """Return a stand-in for a function with `functools.lru_cache`, whose results are copied like everything else.

        What the run adds to the cache is removed after it. One entry cannot be removed alone, so all are, which only
        costs the time to compute them again.
        """
        made: dict[int, Any] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            before = function.cache_info().misses
            result = function(*args, **kwargs)
            if function.cache_info().misses != before:
                made[id(result)] = result
            return result if id(result) in made else self._value(result)

        def clear() -> None:
            if made:
                function.cache_clear()

        self.add(function.__wrapped__)
        self._undo.append(clear)
        twin: Any = functools.update_wrapper(call, function)
        twin.cache_info, twin.cache_clear = function.cache_info, function.cache_clear
        return twin

    def follow(self) -> None:
        while self._waiting:
            self._follow(self._waiting.pop())

    def _follow(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            self._bind(cell, "cell_contents")
        if not self._is_followed(function.__module__):
            return
        self.add_names(function.__dict__)
        self._bind(function, "__defaults__")
        self._bind(function, "__kwdefaults__")
        used, attributes = names_in(function.__code__)
        for name in used:
            self._bind(function.__globals__, name)
        modules = [source.get(name) for source in (function.__globals__, sys.modules) for name in used | attributes]
        for module in modules:
            if isinstance(module, ModuleType) and self._is_followed(module.__name__):
                for name in attributes & vars(module).keys():
                    self._bind(vars(module), name)
        for name in attributes - self._names:
            self._names.add(name)
            for cls in list(self._classes):
                self._attribute(cls, name)

    def _attribute(self, cls: type, name: str) -> None:
        value = vars(cls).get(name, _MISSING)
        is_descriptor = hasattr(type(value), "__get__")
        for part in ("__func__", "fget", "fset", "func", "__wrapped__"):
            self.add(getattr(value, part, None) if is_descriptor else None)
        self.add(value)
        is_cache = hasattr(type(value), "cache_clear")
        if value is not _MISSING and not name.startswith("__") and (is_cache or not is_descriptor):
            self._bind(cls, name)

    def _bind(self, holder: Any, name: str) -> None:
        if (id(holder), name) in self._bound:
            return
        old = _get(holder, name)
        # Stored first, because the copy of an object may lead to this name again.
        self._bound[id(holder), name] = holder, name, old, old
        with suppress(FlopwatchError):  # for example, TorchScript cannot be copied, but the run may not need it
            self._bound[id(holder), name] = holder, name, old, old if old is _MISSING else self._value(old)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        with ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            for holder, name, old, new in self._bound.values():
                stack.callback(_put, holder, name, old)
                with suppress(AttributeError, TypeError):  # a class of an extension takes no new attributes
                    _put(holder, name, new)
            yield


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, dict | type):
        return (holder if isinstance(holder, dict) else vars(holder)).get(name, _MISSING)
    try:
        return getattr(holder, name)
    except ValueError:  # an empty cell
        return _MISSING


def _put(holder: Any, name: str, value: Any) -> None:
    if _get(holder, name) is value:
        return
    if isinstance(holder, dict):
        if value is _MISSING:
            del holder[name]
        else:
            holder[name] = value
    elif value is _MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def _restore(holder: Any, before: dict[str, Any]) -> None:
    names = holder if isinstance(holder, dict) else vars(holder)
    for name in names.keys() | before.keys():
        if not name.startswith("__"):
            _put(holder, name, before.get(name, _MISSING))
