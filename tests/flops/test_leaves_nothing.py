"""A count changes nothing of the user's: wherever a model keeps state, it is the same after the count as before it.

Each case below is a model that reads and writes a state of one kind, in such a way that the state decides both the
FLOPs and the weights: every square matrix that it keeps is one more product in the next forward pass.
"""

import contextvars
import functools
import gc
import itertools
import random
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import flopwatch
from flopwatch.flops.tracing import copies
from flopwatch.torch_internals.ops import FakeTensor

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class Case:
    """A model, its batch, and what a count must not change."""

    model: nn.Module
    state: Callable[[], Any]
    batch: Any = X


CASES: dict[str, Callable[[], Case]] = {}
REFUSED: dict[str, str] = {}


def case(text: str, refused: str = "") -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[text] = make
        REFUSED[text] = refused
        return make

    return add


def product(x: torch.Tensor, kept: Any) -> torch.Tensor:
    """One product of 1,024 FLOPs per matrix that was kept."""
    for matrix in list(kept):
        x = x + x @ matrix
    return x


class Layer(nn.Module):
    """A layer that keeps its outputs with `keep` and multiplies with those in `kept`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(product(x, self.kept()))
        self.keep(0.1 * out.detach())
        return out

    def kept(self) -> Any:
        raise NotImplementedError

    def keep(self, matrix: torch.Tensor) -> None:
        raise NotImplementedError


class Steps(Layer):
    """A layer that runs one more product per call, up to seven; a call takes its number from `number`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        for _ in range(1 + self.number() % 7):
            out = self.layer(out)
        return out

    def number(self) -> int:
        raise NotImplementedError


def first() -> torch.Tensor:
    return torch.full((8, 8), 0.01)


class Memory:
    def __init__(self) -> None:
        self.queue = first()[None]


@case("an object with a queue of tensors")
def _() -> Case:
    class Model(Layer):
        def kept(self) -> Any:
            return self.memory.queue

        def keep(self, matrix: torch.Tensor) -> None:
            self.memory.queue = torch.cat([self.memory.queue, matrix[None]])[-3:]

    model = Model(memory=Memory())
    return Case(model, lambda: model.memory)


@case("a deque")
def _() -> Case:
    class Model(Layer):
        def kept(self) -> Any:
            return self.items

        def keep(self, matrix: torch.Tensor) -> None:
            self.items.append(matrix)

    model = Model(items=deque([first()], maxlen=2))
    return Case(model, lambda: model.items)


@case("a numpy array that counts calls")
def _() -> Case:
    class Model(Steps):
        def number(self) -> int:
            self.calls += 1
            return int(self.calls[0])

    model = Model(calls=np.zeros(2, dtype=np.int64))
    return Case(model, lambda: model.calls)


@case("a list in a closure of forward")
def _() -> Case:
    held = [first()]

    class Model(Layer):
        def kept(self) -> Any:
            return held

        def keep(self, matrix: torch.Tensor) -> None:
            held.append(matrix)

    return Case(Model(), lambda: held)


@case("a list of the class")
def _() -> Case:
    class Model(Layer):
        held = [first()]  # noqa: RUF012

        def kept(self) -> Any:
            return self.held

        def keep(self, matrix: torch.Tensor) -> None:
            self.held.append(matrix)

    return Case(Model(), lambda: Model.held)


GLOBAL_LIST: list[torch.Tensor] = []


@case("a global list")
def _() -> Case:
    GLOBAL_LIST[:] = [first()]

    class Model(Layer):
        def kept(self) -> Any:
            return GLOBAL_LIST

        def keep(self, matrix: torch.Tensor) -> None:
            GLOBAL_LIST.append(matrix)

    return Case(Model(), lambda: GLOBAL_LIST)


GLOBAL_CACHE: dict[int, torch.Tensor] = {}


def cached_matrix(number: int) -> torch.Tensor:
    if number not in GLOBAL_CACHE:
        GLOBAL_CACHE[number] = first() @ first()
    return GLOBAL_CACHE[number]


@case("a global dict that a function fills")
def _() -> Case:
    GLOBAL_CACHE.clear()

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(product(x, [cached_matrix(x.shape[0])]))
            return out

    return Case(Model(), lambda: GLOBAL_CACHE)


@functools.lru_cache(maxsize=8)
def mask_of(size: int) -> torch.Tensor:
    return first() @ first()


def cached_by_lru(*warm: int) -> Case:
    mask_of.cache_clear()
    for size in warm:
        mask_of(size)

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(product(x, [mask_of(x.shape[0])]))
            return out

    return Case(Model(), lambda: mask_of.cache_info().currsize)


CASES["an empty lru_cache"] = cached_by_lru
CASES["an lru_cache that is filled"] = functools.partial(cached_by_lru, 8)
REFUSED.update({"an empty lru_cache": "", "an lru_cache that is filled": ""})


def numbers() -> Iterator[int]:
    yield from itertools.count()


@case("a generator", "generator")
def _() -> Case:
    class Model(Steps):
        def number(self) -> int:
            return int(next(self.numbers))

    model = Model(numbers=numbers())
    return Case(model, lambda: model.numbers)


PATHS: list[Path] = []
FILES: list[Any] = []


@case("an open file", "TextIOWrapper")
def _() -> Case:
    path = PATHS[0] / f"{len(list(PATHS[0].iterdir()))}.txt"

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.file.write("called\n")
            self.file.flush()
            out: torch.Tensor = self.layer(x)
            return out

    model = Model(file=path.open("w"))
    FILES.append(model.file)
    return Case(model, path.read_text)


class Box:
    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix


class Cache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def update(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        self.keys.append(matrix.detach() * 0.1)
        return self.keys


@case("a cache that is an argument")
def _() -> Case:
    class Model(Layer):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            out: torch.Tensor = self.layer(product(x, list(cache.keys)))
            cache.update(out)
            return out

    cache = Cache()
    return Case(Model(), lambda: cache, (X, cache))


def dict_of(make: Callable[[], Any]) -> Case:
    class Model(Layer):
        def kept(self) -> Any:
            return [matrix for matrices in self.held.values() for matrix in matrices]

        def keep(self, matrix: torch.Tensor) -> None:
            self.held.setdefault("first", []).append(matrix)

    model = Model(held=make())
    return Case(model, lambda: model.held)


class OwnDict(dict[str, Any]):
    pass


for _kind, _make in {"a defaultdict": lambda: defaultdict(list), "a dict of the user's class": OwnDict}.items():
    CASES[_kind] = functools.partial(dict_of, _make)
    REFUSED[_kind] = ""


@dataclass
class Held:
    calls: int = 0
    matrices: list[torch.Tensor] = field(default_factory=list)


class Slots:
    __slots__ = ("calls", "matrices", "unset")

    def __init__(self) -> None:
        self.calls, self.matrices = 0, [first()]


def object_of(make: Callable[[], Any]) -> Case:
    class Model(Layer):
        def kept(self) -> Any:
            self.held.calls += 1
            return self.held.matrices

        def keep(self, matrix: torch.Tensor) -> None:
            self.held.matrices.append(matrix)

    model = Model(held=make())
    return Case(model, lambda: model.held)


CASES["a dataclass"] = functools.partial(object_of, Held)
CASES["an object with slots"] = functools.partial(object_of, Slots)
REFUSED.update({"a dataclass": "", "an object with slots": ""})


@case("objects that refer to each other")
def _() -> Case:
    class Node:
        def __init__(self, parent: Any) -> None:
            self.parent, self.matrix, self.children = parent, first(), list[Any]()

    class Model(Layer):
        def kept(self) -> Any:
            assert self.leaf.parent is self.root, "what was one object stays one"
            return [child.matrix for child in self.root.children]

        def keep(self, matrix: torch.Tensor) -> None:
            self.leaf.parent.children.append(Node(self.leaf))
            self.leaf.matrix = matrix

    root = Node(None)
    leaf = Node(root)
    root.children.append(leaf)
    model = Model(root=root, leaf=leaf)
    return Case(model, lambda: model.root)


can_copy_iterators = sys.version_info < (3, 14)


@case("itertools.count", "" if can_copy_iterators else "count")
def _() -> Case:
    class Model(Steps):
        def number(self) -> int:
            return int(next(self.counter))

    model = Model(counter=itertools.count(1))
    return Case(model, lambda: repr(model.counter))


RANDOM: dict[str, Any] = {
    "random.Random": (random.Random, lambda own: own.randrange(7), lambda own: own.getstate()),
    "numpy's Generator": (
        np.random.default_rng,
        lambda own: int(own.integers(7)),
        lambda own: repr(own.bit_generator.state),
    ),
    "torch.Generator": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda own: int(torch.randint(7, (), generator=own)),
        lambda own: own.get_state(),
    ),
}
GLOBAL_RANDOM: Any = None


def drawing(kind: str, *, is_global: bool) -> Case:
    make, draw, state = RANDOM[kind]
    globals()["GLOBAL_RANDOM"] = make(7)

    class Model(Steps):
        def number(self) -> int:
            return int(draw(GLOBAL_RANDOM if is_global else self.own))

    model = Model(own=make(7))
    return Case(model, lambda: (state(model.own), state(GLOBAL_RANDOM)))


for _kind in RANDOM:
    CASES[_kind] = functools.partial(drawing, _kind, is_global=False)
    CASES[f"a global {_kind}"] = functools.partial(drawing, _kind, is_global=True)
    REFUSED.update({_kind: "", f"a global {_kind}": ""})


@case("a hook that appends to a list")
def _() -> Case:
    kept = [first()]
    model = Layer()
    model.register_forward_pre_hook(lambda module, args: (product(args[0], kept),))
    model.register_forward_hook(lambda module, args, out: kept.append(0.1 * out.detach()))
    vars(model)["forward"] = lambda x: model.layer(x)
    return Case(model, lambda: kept)


class Recorder:
    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = [first()]

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        self.outputs.append(0.1 * out.detach())
        return product(out, self.outputs[:-1])


@case("a hook that removes itself")
def _() -> Case:
    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            self.handle.remove()
            return out

    model = Model()
    model.handle = model.layer.register_forward_hook(lambda module, args, out: product(out, [first()]))
    return Case(model, lambda: len(model.layer._forward_hooks))


@case("attributes of another module")
def _() -> Case:
    class Model(Layer):
        def kept(self) -> Any:
            return self.others[0].last

        def keep(self, matrix: torch.Tensor) -> None:
            self.others[0].last = [matrix]

    model, other = Model(), nn.Identity()
    other.last = [first()]  # type: ignore[assignment]
    model.others = [other]  # type: ignore[assignment]
    return Case(model, lambda: other.last)


@case("a parameter that is no part of the model")
def _() -> Case:
    weight = nn.Parameter(first())

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) @ weight
            return out

    return Case(Model(), lambda: (weight, weight.grad))


@case("a default argument")
def _() -> Case:
    class Model(Layer):
        def forward(self, x: torch.Tensor, kept: list[torch.Tensor] = [first()]) -> torch.Tensor:  # noqa: B006, B008
            out: torch.Tensor = self.layer(product(x, kept))
            kept.append(0.1 * out.detach())
            return out

    return Case(Model(), lambda: Model.forward.__defaults__)


@case("a lock that the model holds while it works")
def _() -> Case:
    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock:
                out: torch.Tensor = self.layer(x)
            return out

    model = Model(lock=threading.Lock())
    return Case(model, lambda: model.lock.locked())


THREAD = threading.local()


@case("a variable of the thread")
def _() -> Case:
    THREAD.held = [first()]

    class Model(Layer):
        def kept(self) -> Any:
            return THREAD.held

        def keep(self, matrix: torch.Tensor) -> None:
            THREAD.held.append(matrix)
            THREAD.last = matrix

    return Case(Model(), lambda: vars(THREAD))


SETTING: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("SETTING", default=[])  # noqa: B039


@case("a context variable")
def _() -> Case:
    SETTING.set([])

    class Model(Layer):
        def kept(self) -> Any:
            return SETTING.get()

        def keep(self, matrix: torch.Tensor) -> None:
            SETTING.set([*SETTING.get(), matrix])

    return Case(Model(), SETTING.get)


@case("an autograd function that counts its calls")
def _() -> Case:
    class Double(torch.autograd.Function):
        calls: list[torch.Tensor] = []  # noqa: RUF012

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            Double.calls.append(gradient)
            return 2 * gradient

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Double.apply(self.layer(product(x, [first()] * len(Double.calls))))  # type: ignore[no-untyped-call]
            return out

    return Case(Model(), lambda: Double.calls)


@case("random numbers of all libraries")
def _() -> Case:
    class Model(Steps):
        def number(self) -> int:
            return random.randrange(7) + int(np.random.randint(7)) + int(torch.randint(7, ()))

    return Case(Model(), lambda: None)


# --- What is compared -------------------------------------------------------------------------------------------------


def described(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return everything that an object holds, in a form that can be compared."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    assert not isinstance(value, FakeTensor)
    if isinstance(value, torch.Tensor):
        return "tensor", value.requires_grad, value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", value.tobytes()
    if isinstance(value, types.GeneratorType):
        return "generator", value.gi_frame is not None and value.gi_frame.f_lasti
    if isinstance(value, dict):
        return [(described(key, seen), described(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | deque):
        return [described(item, seen) for item in value]
    slots = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return type(value).__name__, described({**getattr(value, "__dict__", {}), **slots}, seen)


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def random_states() -> Any:
    return described([random.getstate(), repr(np.random.get_state()), torch.get_rng_state()])


def call(made: Case) -> torch.Tensor:
    if isinstance(made.batch, dict):
        return made.model(**made.batch)  # type: ignore[no-any-return]
    return made.model(*made.batch) if isinstance(made.batch, tuple) else made.model(made.batch)  # type: ignore[no-any-return]


def trained(made: Case) -> list[bytes]:
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        call(made).square().mean().backward()
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in made.model.parameters()]


def fresh(name: str) -> Case:
    seed()
    made = CASES[name]()
    seed()
    return made


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path) -> Iterator[None]:
    PATHS[:] = [tmp_path]
    yield
    sys.modules.pop("state_of_a_model", None)
    while FILES:
        FILES.pop().close()


def fakes_alive() -> int:
    gc.collect()
    return sum(type(each) is FakeTensor for each in gc.get_objects())


def refusal(made: Case, method: Literal["auto", "step"]) -> str:
    """Return why the FLOPs are only estimated, or not counted at all."""
    if method == "auto":
        count = flopwatch.count_flops(made.model, made.batch)
        assert count.method == "estimate"
        return count.notes[0]
    with pytest.raises(flopwatch.UntraceableError) as caught:
        flopwatch.count_flops(made.model, made.batch, method=method)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "step"])
@pytest.mark.parametrize("name", CASES)
def test_a_count_changes_nothing(name: str, method: Literal["auto", "step"]) -> None:
    made = fresh(name)
    with FlopCounterMode(display=False) as truth:
        call(made).square().mean().backward()
    expected = trained(fresh(name))
    made = fresh(name)
    state, draws, fakes = described(made.state()), random_states(), fakes_alive()

    if REFUSED[name]:
        why = refusal(made, method)
        assert f"uses a {REFUSED[name]}, which cannot be copied" in why
    else:
        count = flopwatch.count_flops(made.model, made.batch, method=method)
        assert count.hardware_flops == truth.get_total_flops()
        assert count.method == ("trace" if method == "auto" else "step")
        assert not any("left out" in note for note in count.notes)

    assert described(made.state()) == state
    assert random_states() == draws
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert fakes_alive() <= fakes
    assert trained(made) == expected


def test_the_cases_notice_a_change() -> None:
    """A forward pass on the live model changes the state or the random numbers, or the case would prove nothing."""
    unaffected = {
        "a lock that the model holds while it works",
        "a parameter that is no part of the model",
        "an lru_cache that is filled",
        "an autograd function that counts its calls",
    }
    for name in CASES.keys() - unaffected:
        made = fresh(name)
        before = described(made.state()), random_states()
        call(made)
        assert (described(made.state()), random_states()) != before, name


@pytest.mark.parametrize("name", ["a deque", "a global list", "a cache that is an argument", "a list of the class"])
def test_a_law_changes_nothing(name: str) -> None:
    expected = trained(fresh(name))
    made = fresh(name)
    state, draws = described(made.state()), random_states()

    flopwatch.fit_flops_law(made.model, made.batch)

    assert (described(made.state()), random_states()) == (state, draws)
    assert trained(made) == expected


@pytest.mark.parametrize("method", ["trace", "step"])
def test_a_count_that_fails_changes_nothing(method: Literal["trace", "step"]) -> None:
    GLOBAL_LIST[:] = []

    class Model(Layer):
        held: list[torch.Tensor] = []  # noqa: RUF012

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            GLOBAL_LIST.append(x)
            self.held.append(x)
            raise ValueError("after the damage")

    with pytest.raises(flopwatch.MeasurementError, match="after the damage"):
        flopwatch.count_flops(Model(), X, method=method)

    assert (GLOBAL_LIST, Model.held) == ([], [])


def test_objects_that_feed_or_train_a_model_are_not_copied() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.rows = [1, 2]

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise AssertionError("copied")

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (id(self.data), id(self.data.rows)) == ids
            out: torch.Tensor = self.layer(x)
            return out

    data = Rows()
    ids = id(data), id(data.rows)

    assert flopwatch.count_flops(Model(data=data), X).method == "trace"


def test_a_large_array_is_read_but_neither_copied_nor_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_LARGE_ARRAY", 100)

    class Model(Steps):
        def number(self) -> int:
            assert np.shares_memory(self.table, table)
            if self.writes:
                self.table[0] = 7
            return int(self.table[1])

    table = np.arange(64)

    assert flopwatch.count_flops(Model(table=table, writes=False), X).model_flops == 3 * 2 * 2 * 8**3 + 2 * 2 * 8**3
    with pytest.raises(flopwatch.MeasurementError, match="read-only"):
        flopwatch.count_flops(Model(table=table, writes=True), X)
    assert table[0] == 0


@pytest.mark.slow
def test_objects_that_are_nested_too_deeply_are_told() -> None:
    node: list[Any] = []
    for _ in range(100_000):
        node = [node]

    class Model(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out

    count = flopwatch.count_flops(Model(node=node), X)

    assert count.method == "estimate"
    assert "nested too deeply" in count.notes[0]


@pytest.mark.parametrize("method", ["auto", "trace", "step"])
def test_a_count_inside_a_backward_pass_is_refused(method: Any) -> None:
    model, errors = nn.Linear(8, 8), list[str]()

    def count(gradient: torch.Tensor) -> None:
        try:
            flopwatch.count_flops(model, X, method=method)
        except flopwatch.InputError as error:
            errors.append(str(error))

    out = model(X)
    out.register_hook(count)
    out.sum().backward()

    assert errors == ["a backward pass is running, in which no other step can be counted; count before or after it"]
