"""What steps cost and what that is divided by: the calls, the laws and the peaks of a live run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import describe
from flopwatch.monitor import notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.intake.batch_reader import MADE_UP, BatchReader, Plan, Reading, Work, example_batch, is_mask_only
from flopwatch.monitor.notices import Tell
from flopwatch.monitor.pricing.calls import CallKind, CallListener, OutsideCalls, OutsideWork
from flopwatch.monitor.pricing.certificates import NO_CALLS, Certificates, StepCalls, StepFlops
from flopwatch.monitor.pricing.law_book import CallPrice, FlopMode, LawBook, LawOffer, make_mode
from flopwatch.monitor.pricing.peak_lookup import Peaks, device_of, weights_dtype
from flopwatch.monitor.pricing.watched_step import (
    StepCount,
    WatchedStep,
    is_watched,
    is_watched_by_ranks,
    may_compile,
    next_watched,
    obstacle,
    products_in_graph,
    products_outside,
)
from flopwatch.monitor.ranks.sharing import is_sharded
from flopwatch.records.flops import Peak, PhaseFlops
from flopwatch.records.run import Provenance
from flopwatch.torch_internals import (
    BUFFERS,
    COMPILED_CALL,
    MODULES,
    NON_PERSISTENT_BUFFERS,
    PARAMETERS,
    gradient_hooks,
    recorded_operations,
)

# Whether a model has changed in a way that may change what it costs; looked at once per logging window.


_PLAIN = (bool, int, float, str)
_MOST_ITEMS = 64
_STATE = {PARAMETERS, BUFFERS, MODULES, COMPILED_CALL, NON_PERSISTENT_BUFFERS}


def fingerprint(model: nn.Module) -> int:
    """Changes with parameters, what requires a gradient, and settings of any module."""
    return hash((structure_of(model, with_trained=True), tuple(settings_of(model).items())))


def structure_of(model: nn.Module, *, with_trained: bool) -> int:
    """Changes with the modules and their parameters: about a microsecond per parameter."""
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad if with_trained else None, len(gradient_hooks(p) or ()))
        for name, p in model.named_parameters()
    )
    return hash((parameters, tuple(type(module) for module in model.modules())))


def settings_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Attributes of all modules that may steer them: flags, a depth that a curriculum raises, functions, hooks."""
    seen: dict[int, Any] = {}
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            continue  # its own flags change from step to step, and steer communication only
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN:
                found[path, name] = value
            elif name not in _STATE and value is not None:
                found[path, name] = _told(value, seen)
    return found


def _told(value: Any, seen: dict[int, Any], depth: int = 2) -> Any:
    """A value that can be compared later; None for tensors, modules and whatever says nothing of itself.

    A configuration is shared by all layers, so what was looked at once is not looked at again.
    """
    if type(value) in _PLAIN:
        return value
    if id(value) in seen:
        return seen[id(value)]
    told: Any = None
    if isinstance(value, FunctionType | MethodType):
        told = id(getattr(value, "__func__", value))
    elif isinstance(value, torch.Tensor | nn.Module) or not depth:
        return None
    elif isinstance(value, dict):
        told = tuple((str(key), _told(item, seen, depth - 1)) for key, item in list(value.items())[:_MOST_ITEMS])
    elif isinstance(value, list | tuple):
        told = len(value), tuple(_told(item, seen, depth - 1) for item in value[:_MOST_ITEMS])
    elif isinstance(held := getattr(value, "__dict__", None), dict):
        told = _told(held, seen, depth)
    seen[id(value)] = told
    return told


_LARGE_PARAMETERS = 50_000_000
"""Of a model whose count takes long enough to be announced."""
_MOST_WAITING, _MOST_DECLARED, _MOST_KNOWN_STEPS = 64, 4096, 512
_LOOK_ALLOWANCE_SECONDS, _SHARE_FOR_LOOKS = 1.0, 0.0005
"""Of the run's time for looking whether the model has changed: some milliseconds for a large one."""
_FIRST_ADAPTIVE = 6
_MOST_WATCHES, _SHARE_WATCHED = 24, 0.002
"""Steps that may be counted as they run: so many, and this share of all, besides those that are always."""

NOT_CALLED = "no call of the model was seen in the step, so it is taken as model(batch)"
SHARED_WORK = (
    "steps of a model that several ranks share are not counted as they run, so what they run besides it is not seen"
)
NOT_OPENED = (
    "steps are logged but not opened, so what they run besides the model is not seen: use `with monitor.step()`"
)
COMPILED = "the model runs inside compiled code, where neither its calls nor what runs besides can be seen"
CHANGED_IN_WINDOW = "the model has changed during these steps"
CHANGED = "the model has changed (parameters, what requires a gradient, checkpointing): FLOPs counted anew"


class Pricing:
    """Reads batches, listens to the model's calls, counts when it must, prices steps.

    Attributes:
        model: The model that is trained; let go when the run ends.
        flops_fn: The user's own, or None.
        is_new: True when the provenance has changed since it was last written.
        peaks: Of one device, by compute type.
        shares_batches: True when several ranks work on one batch: a call here is then only a part of its work.
        waits_for_laws: True while another rank counts: nothing is counted here then.
        doubt: The last warning that rows which were called exact may be wrong; None when there was none.
    """

    def __init__(
        self,
        config: MonitorConfig,
        clock: Clock,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        flops_fn: Callable[[Any], int] | None,
        peak_flops_per_s: float | None,
        apart: Callable[[], Any],
        tell: Tell,
        without_grad: Callable[[], None] = lambda: None,
        is_alone: bool = True,
    ) -> None:
        self._config = config
        self._is_alone = is_alone
        self._clock = clock
        self._began = clock()
        self._look_seconds = 0.0
        self.flops_fn = flops_fn
        self._peak_override = peak_flops_per_s or (config.peak_tflops * 1e12 if config.peak_tflops else None)
        self._apart = apart
        self._tell = tell
        self.model: nn.Module | None = None
        self._reader = BatchReader()
        self._mode = self._chosen_mode(clock, loss_fn)
        self._listener = CallListener()
        self._listener.without_grad = without_grad
        self._certificates = Certificates()
        self._settings: dict[tuple[str, str], Any] = {}
        self._harmless_settings: set[tuple[str, str]] = set()
        self._changed_settings: set[tuple[str, str]] = set()
        self._watched: WatchedStep | None = None
        self._met_risks: set[str] = set()
        self._last_flops: dict[Any, StepFlops | None] = {}
        self._outside = OutsideCalls()
        self._nodes_before: int | None = None
        self._nodes_apart = 0
        self._watches = self._futile_watches = 0
        self._watches_next = False
        self.doubt: notices.Words | None = None
        self._settled: tuple[Any, ...] = ()
        """Of the last step that no other count would tell more about."""
        self._last_met: dict[Any, int] = {}
        """Of kinds of steps that should be counted once more, when the last one was met."""
        self._counted_at: dict[Any, int] = {}
        """The last step of a pattern that was counted as it ran."""
        self._due: set[int] = set()
        """Steps on which such a kind is expected again."""
        self._no_watch_before = 0
        """Of `_steps`: none before that one is to be counted, but for `_watches_next`."""
        self._known_steps: dict[Any, StepCalls] = {}
        """Steps that need no second look, by their calls and what autograd has recorded."""
        self._why_not_watched: str | None = None
        self._opens_steps = False
        self._is_in_step = False
        self._steps = 0
        self._fingerprint: Any = None
        self._has_given_up = False
        self._wants_example = False
        self._given: list[Any] = []
        """What was declared for a step in which a check is due."""
        self._declared: dict[int, tuple[Plan, CallKind, str | None]] = {}
        self._undeclared: dict[int, Plan] = {}
        """Plans whose values were looked at while there was nothing to count."""
        self._waiting: set[CallKind] = set()
        self.is_new = True
        self.waits_for_laws = False
        self.shares_batches = False
        self.peaks = Peaks(torch.device("cpu"), self._peak_override, config.dtype)
        self._main_type: str | None = None

    @property
    def has_news(self) -> bool:
        """Whether a provenance is due: what is counted anew has one when it has been counted."""
        book = self._mode.book
        return self.is_new and (book is None or bool(book.laws) or self._has_given_up or self.model is None)

    @property
    def device(self) -> torch.device:
        return self.peaks.device

    def share_peak(self, ranks: int) -> None:
        """So many ranks compute on this one's device."""
        self.is_new = self.peaks.share(ranks) or self.is_new

    @property
    def peak(self) -> Peak | None:
        """Of the type that most of the work runs in."""
        if self._main_type is None:
            return None
        return self.peaks.of(self._main_type)

    def set_model(self, model: nn.Module) -> None:
        """Take another model: what was counted of an earlier one is forgotten."""
        if self.model is not None and self.model is not model:
            self._forget()
        self.model = model
        self.peaks = Peaks(device_of(model), self._peak_override, self._config.dtype)
        self.peaks.look_ahead()
        self.is_new = True
        self._fingerprint = None
        self._known_steps.clear()
        self._undeclared.clear()
        self._nodes_before = recorded_operations()
        if self.flops_fn is None:
            self._listener.listen_to(model)
            if self._is_alone and self._mode.book is not None:
                self._outside.listen_beside(model)

    def close(self) -> None:
        self._outside.stop()
        self.end_watch()
        self._listener.stop()
        self.model = None

    def set_frequency(self, steps: int) -> None:
        self._mode.frequency = steps
        self._known_steps.clear()

    def read(self, batch: Any, lengths: Sequence[int] | None) -> Reading:
        """Look at a batch; its values only when a shape is new."""
        reading = self._reader.read(batch, lengths)
        declared = self._declared.get(id(reading.plan))
        if declared is not None and not self._wants_example and not declared[1].is_per_batch:
            self._given.append(None)
            return reading
        is_asked_for = self._wants_example or (declared is not None and declared[1].is_per_batch)
        if self.model is not None:
            self._given.append(example_batch(self.model, batch, reading.plan) if is_asked_for else None)
        if declared is None and id(reading.plan) not in self._undeclared:
            self._declare(batch, reading.plan)
            reading = self._reader.read(batch, lengths)  # now that the values of masks and positions were looked at
        return reading

    def look_at_held(self, reading: Reading) -> Reading | None:
        return self._reader.look_at_held(reading)

    def user_flops(self, batch: Any) -> int:
        """What the user's own function says."""
        assert self.flops_fn is not None
        flops = self.flops_fn(batch)
        if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
            raise InputError(f"flops_fn must return a positive finite number of FLOPs, got {flops!r}")
        return int(flops)

    def begin_step(self) -> None:
        """A loop that opens its steps: what was called before belongs to none. Counts this one, if it is its turn."""
        if self._is_in_step:  # its next micro-batch
            return
        self._is_in_step = True
        if not self._opens_steps:
            self._opens_steps = True
            self._known_steps.clear()
        listener = self._listener
        if listener.calls or listener.backwards:
            listener.begin_step()
        self._nodes_before, self._nodes_apart = recorded_operations(), 0
        if self._watches_next or self._steps >= self._no_watch_before:
            self._begin_watch()
        if not self._listener.is_compiled and not may_compile():  # else the hook would be compiled with the modules
            self._outside.begin()

    def _pause_watch(self, *, on: bool) -> None:
        if self._watched is not None:
            self._watched.is_paused = on

    def abandon_step(self) -> None:
        """The step has raised."""
        self._is_in_step = False
        self._outside.end()
        self.end_watch()
        self._listener.begin_step()

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """Calls in phases outside of steps are not the training's."""
        was, before = self._listener.is_listening, recorded_operations()
        self._listener.is_listening = self._outside.is_listening = False
        self._pause_watch(on=True)
        try:
            yield
        finally:
            self._listener.is_listening = self._outside.is_listening = was
            self._pause_watch(on=not was)
            if was:  # the outermost
                self._nodes_apart += (recorded_operations() or 0) - (before or 0)

    def _begin_watch(self) -> None:
        if self._watched is not None or self.model is None or self.waits_for_laws or self._has_given_up:
            return
        if self._mode.book is None or self._mode.name == "estimate" or not self._steps:
            return
        if not self._is_turn_to_watch():
            is_turn = is_watched if self._is_alone else is_watched_by_ranks
            self._no_watch_before = min(
                [next_watched(self._steps, is_turn), *(due for due in self._due if due > self._steps)]
            )
            return
        self._due.discard(self._steps)
        self._why_not_watched = self._watch_obstacle(self._mode.book)
        if self._why_not_watched is None:
            self._watched = WatchedStep(self._config.attention)
            self._outside.has_intervals = True
            self._watches += 1

    def _is_turn_to_watch(self) -> bool:
        if not self._is_alone:
            return is_watched_by_ranks(self._steps)
        return is_watched(self._steps) or self._watches_next or self._steps in self._due

    def _watch_obstacle(self, book: LawBook) -> str | None:
        if not self._is_alone and (self.shares_batches or is_sharded(self.model)):
            return SHARED_WORK
        risks = sorted({op for law in book.laws for op in law.mode_risks} | self._met_risks)
        if risks:
            return f"{', '.join(risks)} would differ in the last bits in a step that is counted as it runs"
        return COMPILED if self._listener.is_compiled else obstacle()

    def end_watch(self) -> StepCount | None:
        """The count of the step that ends; None where it was not counted."""
        watched, self._watched = self._watched, None
        if watched is None:
            return None
        count = watched.end()
        self._met_risks |= set(count.risks)
        return count

    @property
    def is_watching(self) -> bool:
        return self._watched is not None

    def end_step(
        self, readings: Sequence[Reading], step: int, settle_earlier: Callable[[], None], loss: Any = None
    ) -> StepCalls:
        """Take the step's calls; count those that are new.

        Args:
            readings: The batches the loop has given.
            step: Its number.
            settle_earlier: Called before prices change: earlier steps keep theirs.
            loss: Of the step, with its graph.
        """
        self._steps += 1
        self._is_in_step = False
        listener = self._listener
        seen, listener.calls = listener.calls, []
        backwards, listener.backwards = listener.backwards, 0
        now, before = recorded_operations(), self._nodes_before
        apart, self._nodes_apart = self._nodes_apart, 0
        outside = self._outside.end()
        if self._outside.intervals:
            outside.add_products(products_outside(loss, self._outside.take_intervals()))
        nodes = None if now is None or before is None else now - before - apart, backwards
        if self._watched is None and not self._wants_example and not listener.unseen:
            known = self._known_steps.get((nodes, outside.sized, *[kind for kind, _ in seen]))
            frequency = self._mode.frequency
            # A check is due with this step or the next one: then the arguments of calls are wanted.
            is_check_near = frequency > 0 and (step + 1) % frequency <= 1
            if known is not None and not is_check_near:
                self._given = []
                self._watches_next = False
                if not self._opens_steps:
                    self._nodes_before = now
                return known
        return self._looked_at(seen, nodes, outside, readings, step, settle_earlier)

    def _looked_at(
        self,
        seen: Sequence[tuple[CallKind, Any]],
        nodes: tuple[int | None, int],
        outside: OutsideWork,
        readings: Sequence[Reading],
        step: int,
        settle_earlier: Callable[[], None],
    ) -> StepCalls:
        """The calls of a step that is not one of those known; see `end_step`."""
        count, model = self.end_watch(), self.model
        if model is None or self._mode.book is None or self._has_given_up:
            self._given = []
            return NO_CALLS
        kinds, examples, doubt = self._calls(seen, readings)
        if self.waits_for_laws:
            return self._kept(StepCalls(kinds, (None,) * len(kinds), doubt, count))
        own_prices = tuple(self._learn(kind, example) for kind, example in zip(kinds, examples, strict=True))
        if self._changed_settings and kinds and examples[0] is not None:
            self._check_settings(kinds[0], examples[0], settle_earlier)
        elif self._mode.is_check_due(step) and kinds:
            self._check(kinds[0], examples[0], settle_earlier)
        self._keep_example_for_check(step)
        if count is not None and not seen and not count.phases.total:
            # The model runs where we do not see it (another process), or not at all.
            count, self._futile_watches = None, self._futile_watches + 1
        calls = StepCalls(kinds, own_prices, doubt, count, self._mode.book, self._certificates, nodes, outside)
        if count is not None and count.optimizer:
            self._tell(*notices.optimizer_products(count.optimizer))
        if count is not None:
            self._certify(calls, count, step, calls_are_sure=bool(seen))
            # Products between the model and its loss that no counted step had would be new nodes of autograd.
            self._outside.has_intervals = self._certificates.runs_more
        self._watches_next = self._would_another_count_help(calls)
        if not self._opens_steps:
            # Never counted as they run: after the last one a mode would stay on, for whatever the program does next.
            self._nodes_before, self._nodes_apart = recorded_operations(), 0
            self._why_not_watched = NOT_OPENED
        if self._needs_no_second_look(calls, seen):
            if len(self._known_steps) >= _MOST_KNOWN_STEPS:
                self._known_steps.clear()
            self._known_steps[(nodes, outside.sized, *[kind for kind, _ in seen])] = calls
        return calls

    def _needs_no_second_look(self, calls: StepCalls, seen: Sequence[tuple[CallKind, Any]]) -> bool:
        """Whether a later step with these very calls would change nothing here, and be told by the same `StepCalls`.

        It would not be counted, nor ask for another count; its calls are priced or cannot be, and none for itself.
        """
        if calls.count is not None or calls.doubt is not None or self.shares_batches or self._changed_settings:
            return False
        if not seen or any(
            example is not None or kind.example is not None or kind.is_per_batch for kind, example in seen
        ):
            return False
        return not self._opens_steps or not self._certificates.needs_another(calls.kind, calls.pattern)

    def look_at_graph(self, calls: StepCalls, loss: Any) -> None:
        """Once per window, and in steps that are counted: is the loss made of the same products?"""
        products = products_in_graph(loss)
        if products is not None and calls.certificates is not None:
            calls.certificates.look_at_graph(calls.kind, products, is_counted=calls.count is not None)

    def _certify(self, calls: StepCalls, count: StepCount, step: int, *, calls_are_sure: bool) -> None:
        self._known_steps.clear()
        prices = self._prices(calls) or []
        is_sure = calls_are_sure and all(price.reason is None for price in prices)
        priced = sum((price.executed for price in prices), PhaseFlops()) if prices else None
        was_exact = self._certificates.verdict(calls.kind, calls.pattern).reason is None
        self._certificates.add(calls.kind, calls.pattern, priced, count, calls_are_sure=is_sure)
        if was_exact and self._certificates.verdict(calls.kind, calls.pattern).reason is not None:
            self.doubt = notices.rows_in_doubt(step, self._counted_at.get(calls.pattern))
            self._tell(*self.doubt)
        if len(self._counted_at) < _MOST_DECLARED:
            self._counted_at[calls.pattern] = step

    def _would_another_count_help(self, calls: StepCalls) -> bool:
        """Whether the next step should be counted as it runs, because steps like this one were not, or only once."""
        if self._steps < _FIRST_ADAPTIVE:  # the first ones are spread, so that rows in between have rates
            return False
        if not self._is_alone:  # all ranks count the same steps
            return False
        if self._watches >= _MOST_WATCHES + self._steps * _SHARE_WATCHED or self._futile_watches > 1:
            return False
        seen = calls.kinds, calls.nodes, calls.outside.sized, self._certificates.version
        if seen == self._settled:  # as the step before
            return False
        kind = calls.kind
        if not self._certificates.needs_another(kind, calls.pattern):
            self._settled = seen
            return False
        if len(self._last_met) >= _MOST_WAITING:
            self._last_met, self._due = {}, set()
        gap = self._steps - self._last_met.get(kind, self._steps)
        self._last_met[kind] = self._steps
        if gap > 1:  # what is done every fiftieth step is not met on the next one
            self._due.add(self._steps - 1 + gap)
            self._no_watch_before = min(self._no_watch_before, self._steps - 1 + gap)
        return gap <= 1

    def _kept(self, calls: StepCalls) -> StepCalls:
        """While another rank counts, only so many examples are kept."""
        for kind in calls.kinds:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.add(kind)
            elif kind not in self._waiting:
                kind.example = None
        return calls

    def _keep_example_for_check(self, step: int) -> None:
        self._wants_example = self._mode.is_check_due(step + 1) or bool(self._changed_settings)
        self._listener.keeps_next = self._wants_example

    def _calls(
        self, seen: Sequence[tuple[CallKind, Any]], readings: Sequence[Reading]
    ) -> tuple[tuple[CallKind, ...], tuple[Any, ...], str | None]:
        """The step's calls; where none was seen, those that its batches suggest."""
        if seen and not self._opens_steps:
            # Between two `log_step`s a loop may evaluate: without gradients and out of training mode.
            seen = [call for call in seen if call[0].has_grad or call[0].is_training]
        unseen, self._listener.unseen = self._listener.unseen, 0
        given, self._given = self._given, []
        if seen and not (self.shares_batches and readings):
            doubt = f"{unseen} calls of the model have arguments that cannot be described" if unseen else None
            return tuple(kind for kind, _ in seen), tuple(example for _, example in seen), doubt
        declared = [self._declared[id(reading.plan)] for reading in readings if id(reading.plan) in self._declared]
        reasons = [reason for _, _, reason in declared if reason] or [
            COMPILED if self._listener.is_compiled else NOT_CALLED
        ]
        kinds = tuple(kind for _, kind, _ in declared)
        examples = tuple(given) if len(given) == len(kinds) else (None,) * len(kinds)
        return kinds, examples, reasons[0]

    def _declare(self, batch: Any, plan: Plan) -> None:
        """What a batch of this shape suggests that the model is called with."""
        model = self.model
        if len(self._declared) + len(self._undeclared) >= _MOST_DECLARED:
            self._declared.clear()
            self._undeclared.clear()
        remark = self._reader.check_values(batch, plan)
        if remark:
            self._tell("warning", "positions_not_understood", remark)
        if model is None or self._mode.book is None:
            self._undeclared[id(plan)] = plan
            return
        self._undeclared.clear()
        example = example_batch(model, batch, plan)
        autocast = self._listener.compiled_autocast
        trainable = hash(tuple(p.requires_grad for p in model.parameters()))
        kind = CallKind(describe(example), True, model.training, autocast, trainable, example)
        self._declared[id(plan)] = plan, kind, MADE_UP if is_mask_only(batch) else None

    def _learn(self, kind: CallKind, example: Any) -> CallPrice | None:
        """Get to know a kind of call; returns the price of this very call where every one has its own."""
        book, model = self._mode.book, self.model
        assert book is not None
        assert model is not None
        if kind.is_per_batch and example is not None:
            with self._apart():
                return book.count_call(model, kind, example)
        if kind.example is None or self._has_given_up:
            return None
        if book.price(kind) is not None:
            kind.example = None
            return None
        self.is_new = True
        if not book.laws and sum(p.numel() for p in model.parameters()) > _LARGE_PARAMETERS:
            self._tell(*notices.counting())
        try:
            with self._apart():
                if self._fingerprint is None:
                    self._fingerprint, self._settings = self._look(model)
                price = book.learn(model, kind, kind.example)
            if price is not None:
                kind.example = None
                kind.is_per_batch = book.is_per_batch(kind)
                self._reader.reads_targets |= _has_target(book)
                return price if kind.is_per_batch else None
        except Exception as error:  # the model's own code runs in there
            self._give_up_on(kind, error)
            if self._config.strict:
                raise
        return None

    def _give_up_on(self, kind: CallKind, error: Exception) -> None:
        """A call that cannot be counted on its own: only steps that are counted as they run have FLOPs."""
        kind.example = None
        if kind.has_grad:
            self._tell(
                "warning",
                "flops_unknown",
                f"there will be no FLOPs and no MFU but of steps that were counted as they ran: {error}. Pass "
                "batch= as the model takes it, loss_fn=..., or flops_fn=... with a number of your own",
            )

    def _check(self, kind: CallKind, example: Any, settle_earlier: Callable[[], None]) -> None:
        """Count this call and compare with what it is priced at."""
        model, book = self.model, self._mode.book
        assert model is not None
        assert book is not None
        message = None
        if self._mode.later is not None:
            message = "FLOPs were estimated so far and are counted from here on"
        elif example is not None:
            with self._apart():
                agrees = book.check(model, kind, example, within_allowance=self._mode.within_allowance)
            if agrees is False:
                message = "this batch does not cost what the FLOP law says: FLOPs counted anew"
        if message is None:
            return
        settle_earlier()
        self._mode.start_counting()
        self._forget()
        self._tell("info", "flops_counted_anew", message)
        if example is not None and self._mode.book is not None:
            kind.example = example
            self._learn(kind, None)

    def look_at_model(self) -> str | None:
        """Once per window: whether the model has changed since it was counted; returns why the window is in doubt."""
        model = self.model
        if model is None or self._fingerprint is None or self.waits_for_laws:
            return None
        began = self._clock()
        if self._look_seconds > _LOOK_ALLOWANCE_SECONDS + _SHARE_FOR_LOOKS * (began - self._began):
            return None
        structure, settings = self._look(model)
        self._look_seconds += self._clock() - began
        before, self._settings = self._settings, settings
        if structure != self._fingerprint:
            self._fingerprint = structure
            self._forget()
            self._listener.look_at_parameters()
            self._tell("info", "flops_counted_anew", CHANGED)
            return CHANGED_IN_WINDOW
        changed = {key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key)}
        changed -= self._harmless_settings
        if not changed:
            return None
        self._changed_settings |= changed
        self._known_steps.clear()
        self._wants_example = self._listener.keeps_next = True
        names = ", ".join(sorted(f"{path or type(model).__name__}.{name}" for path, name in changed)[:3])
        return f"settings of the model changed during these steps ({names})"

    def _look(self, model: nn.Module) -> tuple[Any, dict[tuple[str, str], Any]]:
        """What makes up the model; which weights are trained is seen on every call, where calls are seen."""
        return structure_of(model, with_trained=not self._listener.has_been_called), settings_of(model)

    def _check_settings(self, kind: CallKind, example: Any, settle_earlier: Callable[[], None]) -> None:
        """Settings have changed: if the next call costs what it cost before, they do not matter."""
        model, book = self.model, self._mode.book
        changed, self._changed_settings = self._changed_settings, set()
        assert model is not None
        assert book is not None
        with self._apart():
            agrees = book.check(model, kind, example, within_allowance=False) if example is not None else None
        if agrees is not False:
            self._harmless_settings |= changed if agrees else set()
            return
        settle_earlier()
        self._forget()
        self._tell("info", "flops_counted_anew", CHANGED)
        kind.example = example
        self._learn(kind, None)

    def _forget(self) -> None:
        """From here on everything is counted anew; steps that are not settled yet keep what was known."""
        if self._mode.book is not None:
            self._mode.book = self._mode.book.renewed()
        self._certificates = Certificates()
        self._settled = ()
        self._listener.forget()
        self._declared.clear()
        self._known_steps.clear()
        self.is_new = True

    def _prices(self, calls: StepCalls) -> list[CallPrice] | None:
        book = calls.book or self._mode.book
        if book is None or not calls.kinds:
            return None
        prices = [own or book.price(kind) for kind, own in zip(calls.kinds, calls.own_prices, strict=True)]
        return None if None in prices else [price for price in prices if price is not None]

    def flops(self, calls: StepCalls, works: Sequence[Work]) -> StepFlops | None:
        """What a step costs; tells once when some are not known. Steps of a window are mostly alike."""
        is_plain = not any(calls.own_prices) and all(work.documents is None and work.grids is None for work in works)
        if not is_plain or calls.certificates is None:
            return self._flops(calls, works)
        shapes = tuple((work.plan.batch_size, work.plan.seq_len) for work in works)
        key = calls.kind, shapes, calls.doubt, id(calls.certificates), calls.certificates.version
        if key not in self._last_flops:
            self._last_flops = {key: self._flops(calls, works)}
        return self._last_flops[key]

    def _flops(self, calls: StepCalls, works: Sequence[Work]) -> StepFlops | None:
        book = calls.book or self._mode.book
        if self._has_given_up or book is None:
            return None
        prices = self._prices(calls)
        verdict = (calls.certificates or self._certificates).verdict(calls.kind, calls.pattern)
        if prices is None and verdict.count is None:
            if book.refused:
                self._tell_refused()
            return None
        if prices is None:
            assert verdict.count is not None
            return _counted(verdict.count, verdict.reason)
        priced = self._priced(calls, prices, works)
        self._note_main_type(priced)
        if verdict.finding == "counted" and verdict.count is not None:
            return _counted(verdict.count, verdict.reason or self._steered(calls, prices), priced)
        doubt = calls.doubt or (self._why_not_watched if verdict.finding == "unseen" else None) or verdict.reason
        return StepFlops(
            priced.model, priced.hardware, priced.recompute, priced.model_by_dtype, priced.hardware_by_dtype,
            priced.reason or doubt,
        )  # fmt: skip

    def _steered(self, calls: StepCalls, prices: Sequence[CallPrice]) -> str | None:
        """Why steps of this kind may cost something else than those that were counted."""
        if not any(price.is_steered for price in prices):
            return None
        certificates, book = calls.certificates or self._certificates, calls.book or self._mode.book
        is_hidden = book is None or any(map(book.hides_cost, calls.kinds))
        if not is_hidden and certificates.nodes_tell_costs(calls.kind):
            return None
        return next(price.reason for price in prices if price.is_steered)

    def _priced(self, calls: StepCalls, prices: Sequence[CallPrice], works: Sequence[Work]) -> StepFlops:
        """The sum over the step's calls; padding is told apart where calls and batches are the same."""
        book = calls.book or self._mode.book
        assert book is not None
        aligned = len(works) == len(prices) and all(map(_is_same_shape, prices, works))
        model = hardware = recompute = 0
        by_dtype: dict[str, PhaseFlops] = {}
        reasons = [price.reason for price in prices if price.reason]
        is_typed = True
        for index, price in enumerate(prices):
            needed = executed = price.executed
            if aligned:
                price = book.with_images(price, works[index].grids) or price
                needed, executed, told = book.needed(price, works[index])
                reasons += [told] if told else []
            model += needed.forward + needed.backward
            hardware += executed.total
            recompute += executed.recompute
            is_typed = is_typed and bool(price.by_dtype)
            for name, flops in price.by_dtype.items():
                by_dtype[name] = by_dtype.get(name, PhaseFlops()) + flops
        if not aligned and any(work.documents is not None for work in works):
            reasons.append("padding counts as work here, because the step's calls are not its batches")
        types = by_dtype if is_typed else {}
        return StepFlops(
            model, hardware, recompute, _shares(types, model), _shares(types, hardware), reasons[0] if reasons else None
        )

    def _note_main_type(self, priced: StepFlops) -> None:
        if priced.model_by_dtype:
            main = max(priced.model_by_dtype, key=lambda name: priced.model_by_dtype[name])
            self.is_new = self.is_new or main != self._main_type
            self._main_type = main

    def peak_seconds(self, flops: StepFlops | None) -> tuple[float | None, float | None]:
        """How long the device needs at its peaks for the model's FLOPs, and for those executed."""
        if flops is None:
            return None, None
        assumed = weights_dtype(self.model, self.device) or "fp32" if not flops.model_by_dtype else None
        if assumed is not None and self._main_type is None:
            self._main_type = assumed
            self.is_new = True
        model = self.peaks.seconds(flops.model_by_dtype or {assumed or "fp32": flops.model})
        hardware = None
        if flops.hardware is not None:
            hardware = self.peaks.seconds(flops.hardware_by_dtype or {assumed or "fp32": flops.hardware})
        for name, why in self.peaks.why_unknown.items():
            self._tell("warning", "peak_unknown", f"there will be no MFU: the peak for {name} is not known. {why}")
        return model, hardware

    def _tell_refused(self) -> None:
        self._tell(
            "info",
            "shapes_not_counted",
            "batches keep coming in shapes that were never counted, and counting has had its share of the time: "
            "their steps have no FLOPs (perf/counted_steps_percent); pass flops_fn=... to have them all",
        )

    def offer(self) -> LawOffer | None:
        return None if self._has_given_up or self._mode.book is None else self._mode.book.offer()

    def adopt(self, offer: LawOffer | None) -> None:
        """Use what the logging rank has counted; kinds of calls it has not met are counted here."""
        self.waits_for_laws = False
        self._waiting.clear()
        self._known_steps.clear()
        if offer is not None and self.model is not None and self._mode.book is not None:
            self._fingerprint, self._settings = self._look(self.model)
            self._mode.book.adopt(offer)
        elif offer is None:
            self._has_given_up = self.flops_fn is None

    def learn_kept(self, calls: StepCalls) -> None:
        """Count what was met while another rank's laws were waited for."""
        for kind in calls.kinds:
            if self._mode.book is not None and self.model is not None:
                self._learn(kind, None)

    def provenance(self, step: int, device_count: int) -> Provenance:
        facts = self._mode.facts()
        coverage = facts["coverage"]
        if coverage is not None and coverage < 1:
            self._tell(
                "warning",
                "coverage_below_1",
                f"{100 * (1 - coverage):.3g} % of the matmul-like op calls have no formula, so MFU is a lower bound: "
                f"{'; '.join(facts['notes'])}. Add one with flopwatch.register_formula",
            )
        peak = self.peak
        return Provenance(
            step,
            self._mode.name,
            facts["method"],
            facts["exact"],
            self._config.attention,
            coverage,
            facts["law"],
            None if peak is None else peak.to_json(),
            device_count,
            notes=facts["notes"],
        )

    def _chosen_mode(self, clock: Clock, loss_fn: Callable[[Any], torch.Tensor] | None) -> FlopMode:
        if self.flops_fn is not None:
            note = "as the user's function says; what is executed is not known"
            return FlopMode("flops_fn", None, method="flops_fn", notes=(note,))
        try:
            return make_mode(self._config, clock, loss_fn)
        except InputError as error:
            if self._config.strict:
                raise
            self._tell("error", "flops_unknown", f"there will be no FLOPs and no MFU: {error}")
            return FlopMode(self._config.mode, None, notes=(str(error),))


def _has_target(book: LawBook) -> bool:
    """Whether labels have a length of their own in one of the laws."""
    return any(
        law.layout is not None and "t" in law.layout.lengths and "labels" in law.layout.paths_along("t")
        for law in book.laws
    )


def _is_same_shape(price: CallPrice, work: Work) -> bool:
    shape = price.shape
    if shape is None:
        return work.documents is None
    return shape.batch_size == work.plan.batch_size and shape.seq_len in (None, work.plan.seq_len)


def _shares(by_dtype: Mapping[str, PhaseFlops], total: int) -> dict[str, int]:
    """A total over compute types, in the proportions of what is executed."""
    if len(by_dtype) == 1:
        return {next(iter(by_dtype)): total}
    executed = sum(flops.total for flops in by_dtype.values())
    if not executed:
        return {}
    return {name: round(total * flops.total / executed) for name, flops in by_dtype.items()}


def _counted(count: StepCount, reason: str | None, priced: StepFlops | None = None) -> StepFlops:
    """The cost of a step that was counted as it ran; padding is what the priced calls say of it."""
    total, recompute = count.phases.total, count.phases.recompute
    padding = 0
    if priced is not None and priced.hardware is not None and priced.recompute is not None:
        padding = priced.hardware - priced.recompute - priced.model
    model = total - recompute - padding
    types = count.by_dtype
    return StepFlops(model, total, recompute, _shares(types, model), _shares(types, total), reason)
