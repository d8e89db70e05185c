"""Counts the FLOPs of new kinds of model calls, checks earlier counts, and detects whether the model has changed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.monitor import output as notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.output import Notify
from flopwatch.monitor.pricing.calls import CallKind
from flopwatch.monitor.pricing.certificates import Certificates, StepCalls
from flopwatch.monitor.pricing.law_book import CallPrice, FlopMode, LawBook, LawOffer
from flopwatch.torch_internals import COMPILED_CALL, module_tables

_LARGE_PARAMETERS = 50_000_000
"""Counting the FLOPs of a model with more parameters than this takes some seconds, so the user is told beforehand."""
_MOST_WAITING = 64
"""The maximum number of kinds of calls whose arguments are kept while another rank counts FLOPs."""
_LOOK_ALLOWANCE_SECONDS, _SHARE_FOR_LOOKS = 1.0, 0.0005
"""Limit on the time for checking whether the model has changed: 1 s plus 0.05 % of the run's time. One check of a large
model takes some milliseconds."""

CHANGED = "the model has changed (parameters, what requires a gradient, checkpointing), so its FLOPs are counted again"
_ESTIMATED_SO_FAR = "FLOPs were estimated so far and are counted from now on"
CHANGED_IN_WINDOW = "the model has changed during these steps"


class ModelChange(NamedTuple):
    """The result of checking whether the model has changed.

    Attributes:
        doubt: Why the FLOPs of the logging window are not exact; None if nothing has changed.
        is_counted_anew: Whether all earlier counts were dropped.
        needs_example: Whether the FLOPs of the next call must be counted, to see whether changed settings affect them.
    """

    doubt: str | None = None
    is_counted_anew: bool = False
    needs_example: bool = False


_UNCHANGED = ModelChange()


class CallCosts:
    """Holds the FLOP laws of a run: formulas that give the FLOPs of a call from the shapes of its arguments.

    Attributes:
        mode: How FLOPs are computed; contains the laws.
        model: The model that is trained; None before it is given and after the run.
        certificates: The results of comparing the laws with FLOPs that were counted while steps ran.
        has_given_up: True if the rank that writes the log has no laws, so that no step of this rank has FLOPs.
        waits_for_laws: True while this rank waits for the laws of the rank that writes the log.
        check_every: Steps between two checks of a law; 0 means never. An attribute, because a property is slower.
        version: Increased whenever results of earlier steps can no longer be used for later steps with the same calls.
        facts_version: Increased whenever the log's record of how FLOPs are found may have changed.
    """

    def __init__(
        self,
        config: MonitorConfig,
        clock: Clock,
        mode: FlopMode,
        *,
        waits_for_laws: bool,
        off_the_clock: Callable[[], AbstractContextManager[None]],
        notify: Notify,
    ) -> None:
        """`off_the_clock` returns a context manager. Time and model calls inside this context belong to no step."""
        self._config = config
        self._clock = clock
        self._began = clock()
        self.mode = mode
        self.check_every = mode.frequency
        self._off_the_clock = off_the_clock
        self._notify = notify
        self.model: nn.Module | None = None
        self.certificates = Certificates()
        self.has_given_up = False
        self.waits_for_laws = waits_for_laws
        self.version = self.facts_version = 0
        self._structure: int | None = None
        self._settings: dict[tuple[str, str], Any] = {}
        self._harmless_settings: set[tuple[str, str]] = set()
        self._changed_settings: set[tuple[str, str]] = set()
        self._look_seconds = 0.0
        self._sees_calls = False
        self._waiting: set[CallKind] = set()

    @property
    def can_count(self) -> bool:
        return self.model is not None and self.mode.book is not None and not self.has_given_up

    @property
    def has_facts(self) -> bool:
        """Whether the record of how FLOPs are found can be written; False until the model's FLOPs have been counted."""
        book = self.mode.book
        return book is None or bool(book.laws) or self.has_given_up or self.model is None

    @property
    def has_changed_settings(self) -> bool:
        return bool(self._changed_settings)

    @property
    def reads_targets(self) -> bool:
        """Whether one of the formulas for the FLOPs depends on the length of the labels."""
        book = self.mode.book
        return book is not None and any(
            law.layout is not None and "t" in law.layout.lengths and "labels" in law.layout.paths_along("t")
            for law in book.laws
        )

    def set_model(self, model: nn.Module) -> None:
        """Set the model, and drop the FLOP formulas of an earlier model."""
        if self.model is not None and self.model is not model:
            self._forget()
        self.model = model
        self._structure = None
        self._note_change()

    def set_check_every(self, steps: int) -> None:
        self.mode.frequency = self.check_every = steps
        self.version += 1

    def see_calls(self) -> None:
        """From now on `look_at_model` does not check which weights are trained, because recorded calls show it."""
        self._sees_calls = True

    def keep_waiting(self, kinds: Sequence[CallKind]) -> None:
        """Keep the `example` of at most 64 `kinds` while this rank waits for the logging rank's FLOP formulas."""
        for kind in kinds:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.add(kind)
            elif kind not in self._waiting:
                kind.example = None

    def learn(self, kind: CallKind, example: Any = None) -> CallPrice | None:
        """Count the FLOPs of a kind of call if it is new.

        Returns:
            The FLOPs of this one call, if each call of its kind must be counted separately; otherwise None.
        """
        book, model = self.mode.book, self.model
        assert book is not None
        assert model is not None
        if kind.is_per_batch and example is not None:
            with self._off_the_clock():
                return book.count_call(model, kind, example)
        if kind.example is None or self.has_given_up:
            return None
        if book.price(kind) is not None:
            kind.example = None
            return None
        self.facts_version += 1
        if not book.laws and sum(p.numel() for p in model.parameters()) > _LARGE_PARAMETERS:
            self._notify(*notices.counting())
        try:
            return self._learn_new(model, book, kind)
        except Exception as error:  # the model may raise anything; without `example` it is not counted again
            kind.example = None
            if kind.has_grad:
                self._notify(*notices.flops_unknown(error))
            if self._config.strict:
                raise
        return None

    def _learn_new(self, model: nn.Module, book: LawBook, kind: CallKind) -> CallPrice | None:
        with self._off_the_clock():
            if self._structure is None:
                self._look(model)
            price = book.learn(model, kind, kind.example)
        if price is None:
            return None
        kind.example = None
        kind.is_per_batch = book.is_per_batch(kind)
        return price if kind.is_per_batch else None

    def needs_example_after(self, step: int) -> bool:
        """Whether the arguments of the next step's model call must be kept, to check the FLOP formula with them."""
        return self.mode.is_check_due(step + 1) or bool(self._changed_settings)

    def why_count_anew(self, kind: CallKind, example: Any, step: int) -> str | None:
        """If a check is due with this step, check the FLOP formula; return why FLOPs must be counted again, or None."""
        if self._changed_settings and example is not None:
            return self._check_settings(kind, example)
        return self._check(kind, example) if self.mode.is_check_due(step) else None

    def _check(self, kind: CallKind, example: Any) -> str | None:
        """Count this call's FLOPs and compare them with the formula; return why to count again, or None."""
        if self.mode.later is not None:
            return _ESTIMATED_SO_FAR
        if self._agrees(kind, example, within_allowance=self.mode.within_allowance) is False:
            return "the FLOPs counted for this batch differ from the formula, so the model's FLOPs are counted again"
        return None

    def _check_settings(self, kind: CallKind, example: Any) -> str | None:
        """Like `_check`, but without the time limit for checks, because settings of the model have changed."""
        changed, self._changed_settings = self._changed_settings, set()
        agrees = self._agrees(kind, example, within_allowance=False)
        self._harmless_settings |= changed if agrees else set()
        return CHANGED if agrees is False else None

    def _agrees(self, kind: CallKind, example: Any, *, within_allowance: bool) -> bool | None:
        model, book = self.model, self.mode.book
        if example is None or model is None or book is None:
            return None
        with self._off_the_clock():
            return book.check(model, kind, example, within_allowance=within_allowance)

    def count_anew(self, kind: CallKind, example: Any, why: str) -> None:
        """Drop all FLOP formulas, and count FLOPs again, beginning with this call."""
        if why == _ESTIMATED_SO_FAR:
            self.mode.book, self.mode.later = self.mode.later, None
        self._forget()
        self._notify("info", "flops_counted_anew", why)
        if example is not None and self.mode.book is not None:
            kind.example = example
            self.learn(kind)

    def _forget(self) -> None:
        """Drop all FLOP formulas. Earlier steps whose FLOPs are not computed yet still use the old formulas."""
        if self.mode.book is not None:
            self.mode.book = self.mode.book.renewed()
        self.certificates = Certificates()
        self._note_change()

    def _note_change(self) -> None:
        self.version += 1
        self.facts_version += 1

    def look_at_model(self) -> ModelChange:
        """Check whether the model has changed since its FLOPs were counted; called once per logging window."""
        model = self.model
        if model is None or self._structure is None or self.waits_for_laws:
            return _UNCHANGED
        began = self._clock()
        if self._look_seconds > _LOOK_ALLOWANCE_SECONDS + _SHARE_FOR_LOOKS * (began - self._began):
            return _UNCHANGED
        structure, settings = self._structure, self._settings
        self._look(model)
        self._look_seconds += self._clock() - began
        if self._structure != structure:
            self._forget()
            self._notify("info", "flops_counted_anew", CHANGED)
            return ModelChange(CHANGED_IN_WINDOW, is_counted_anew=True)
        now = self._settings
        changed = {key for key in settings.keys() | now.keys() if settings.get(key) != now.get(key)}
        changed -= self._harmless_settings
        if not changed:
            return _UNCHANGED
        self._changed_settings |= changed
        self.version += 1
        names = ", ".join(sorted(f"{path or type(model).__name__}.{name}" for path, name in changed)[:3])
        return ModelChange(f"settings of the model changed during these steps ({names})", needs_example=True)

    def _look(self, model: nn.Module) -> None:
        self._structure = structure_of(model, with_trained=not self._sees_calls)
        self._settings = settings_of(model)

    def offer(self) -> LawOffer | None:
        """The FLOP formulas to send to the other ranks; None if there are none."""
        return None if self.has_given_up or self.mode.book is None else self.mode.book.offer()

    def adopt(self, offer: LawOffer | None) -> None:
        """Use the logging rank's FLOP formulas (laws). This rank counts calls that the formulas do not cover."""
        self.waits_for_laws = False
        self._waiting.clear()
        self.version += 1
        if offer is not None and self.model is not None and self.mode.book is not None:
            self._look(self.model)
            self.mode.book.adopt(offer)
        elif offer is None:
            self.has_given_up = self.mode.name != "flops_fn"

    def learn_kept(self, calls: StepCalls) -> None:
        """Count the FLOPs of calls that were made while this rank waited for the logging rank's FLOP formulas."""
        if self.mode.book is not None and self.model is not None:
            for kind in calls.kinds:
                self.learn(kind)


_PLAIN = (bool, int, float, str)
_MOST_ITEMS = 64
_SET_BY_SAVING = frozenset({"architectures", "dtype", "_dtype", "torch_dtype", "transformers_version", "_commit_hash"})
"""What `save_pretrained` of a Hugging Face model writes into its configuration. No FLOPs depend on it."""


def fingerprint(model: nn.Module) -> int:
    """A hash of the model's parameters, their `requires_grad` flags, and the settings of all modules."""
    return hash((structure_of(model, with_trained=True), tuple(settings_of(model).items())))


def structure_of(model: nn.Module, *, with_trained: bool) -> int:
    """A hash of the modules and their parameters, including `requires_grad` if `with_trained` is True."""
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad if with_trained else None)
        for name, p in model.named_parameters()
    )
    return hash((parameters, tuple(type(module) for module in model.modules())))


def settings_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return those attributes of all modules on which FLOPs can depend, such as flags, functions and hooks."""
    seen: dict[int, Any] = {}
    found: dict[tuple[str, str], Any] = {}
    tables = module_tables()
    state = {tables.parameters, tables.buffers, tables.modules, tables.not_persistent, COMPILED_CALL}
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            continue  # the flags of DDP change from step to step, and affect only communication
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN:
                found[path, name] = value
            elif name not in state and value is not None:
                found[path, name] = _described(value, seen)
    return found


def _described(value: Any, seen: dict[int, Any], depth: int = 2) -> Any:
    """Convert a value to one that can be compared later; None for tensors, modules and objects without attributes.

    `seen` maps the ids of values to results, so that a configuration that all layers share is converted only once.
    """
    if type(value) in _PLAIN:
        return value
    if id(value) in seen:
        return seen[id(value)]
    described: Any = None
    if isinstance(value, FunctionType | MethodType):
        described = id(getattr(value, "__func__", value))
    elif isinstance(value, torch.Tensor | nn.Module) or not depth:
        return None
    elif isinstance(value, dict):
        described = tuple(
            (str(key), _described(item, seen, depth - 1)) for key, item in list(value.items())[:_MOST_ITEMS]
        )
    elif isinstance(value, list | tuple):
        described = len(value), tuple(_described(item, seen, depth - 1) for item in value[:_MOST_ITEMS])
    elif isinstance(held := getattr(value, "__dict__", None), dict):
        if hasattr(value, "save_pretrained"):
            held = {name: item for name, item in held.items() if name not in _SET_BY_SAVING}
        described = _described(held, seen, depth)
    seen[id(value)] = described
    return described
