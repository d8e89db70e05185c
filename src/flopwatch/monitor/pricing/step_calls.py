"""Records what a step runs: its calls of the model and of other modules, and in some steps its FLOPs, op by op."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import describe
from flopwatch.monitor import output as notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.output import NoticeText, Notify
from flopwatch.monitor.pricing.batch_reader import (
    MADE_UP,
    BatchLayout,
    BatchReader,
    Reading,
    example_batch,
    is_mask_only,
)
from flopwatch.monitor.pricing.call_costs import CallCosts
from flopwatch.monitor.pricing.calls import CallKind, CallListener, OutsideCalls, OutsideWork
from flopwatch.monitor.pricing.certificates import NO_CALLS, StepCalls, WatchPlan
from flopwatch.monitor.pricing.watched_step import (
    StepCount,
    WatchedStep,
    may_compile,
    obstacle,
    products_in_graph,
    products_outside,
)
from flopwatch.monitor.ranks.layout import is_sharded
from flopwatch.records.flops import PhaseFlops
from flopwatch.torch_internals import recorded_operations

_MOST_DECLARED, _MOST_KNOWN_STEPS = 4096, 512

NOT_CALLED = "no call of the model was seen in the step, so one call model(batch) is assumed"
SHARED_WORK = (
    "the model is shared by several ranks, so steps are not counted as they run, and work outside the model is not seen"
)
NOT_OPENED = (
    "steps are logged but not opened, so work outside the model is not seen; open them with `with monitor.step()`"
)
COMPILED = "the model runs inside compiled code, where neither its calls nor work outside the model can be seen"

SeenCalls = Sequence[tuple[CallKind, Any]]
"""Calls of the model in a step, with their arguments if these were kept, otherwise None."""


class StepNoter:
    """Reads the batches of a step, records its calls of the model, and has the FLOPs of new kinds of calls counted.

    `begin_step`, `read` and `end_step` run on every step. They are not split into smaller functions, because
    right after a training step each call of a Python function costs about a microsecond.

    Attributes:
        doubt: The last warning that rows of the log may be wrong although marked as exact; None if there was none.
        why_not_watched: Why steps are not counted as they run; None if they are.
    """

    def __init__(
        self,
        config: MonitorConfig,
        costs: CallCosts,
        is_alone: bool,
        on_call: Callable[[bool], None],
        notify: Notify,
    ) -> None:
        """`on_call` is called with each call of the model; its argument says whether gradients are enabled."""
        self._attention = config.attention
        self._costs = costs
        self._is_alone = is_alone
        self._notify = notify
        self._reader = BatchReader()
        self._listener = CallListener(on_call)
        self._outside = OutsideCalls()
        self._plan = WatchPlan(is_alone=is_alone)
        self.doubt: NoticeText | None = None
        self.why_not_watched: str | None = None
        self._shares_batches = False
        self._calls_doubt: str | None = None
        self._watched: WatchedStep | None = None
        self._met_risks: set[str] = set()
        self._nodes_before: int | None = None
        self._nodes_apart = 0
        self._watches_next = False
        self._counted_at: dict[Any, int] = {}
        """For each pattern (the calls of a step, without sizes), the last step whose FLOPs were counted as it ran."""
        self._known_steps: dict[Any, StepCalls] = {}
        """Results of earlier steps, by a key made of the step's calls. Later steps with the same calls reuse them."""
        self._known_version = 0
        """The value of `CallCosts.version` for which `_known_steps` is valid."""
        self._opens_steps = self._is_in_step = self._keeps_example = False
        self._steps = 0
        self._given: list[Any] = []
        """For each batch of the step, its arguments for the model if they are needed, otherwise None."""
        self._declared: dict[int, tuple[BatchLayout, CallKind, str | None]] = {}
        """By the id of a `BatchLayout`: the layout, the expected model call, and why that is uncertain (or None)."""
        self._undeclared: dict[int, BatchLayout] = {}
        """By id: layouts of batches that were read before the model was known, or in a mode without FLOP formulas."""

    def set_model(self, model: nn.Module) -> None:
        if self._costs.model is not None and self._costs.model is not model:
            self._forget_calls()
        self._costs.set_model(model)
        self._undeclared.clear()
        self._nodes_before = recorded_operations()
        if self._costs.mode.name != "flops_fn":
            self._listener.listen_to(model)
            if self._is_alone and self._costs.mode.book is not None:
                self._outside.listen_beside(model)

    def set_shares_batches(self, shares: bool) -> None:
        """Set whether several ranks work on one batch, so that the calls on this rank are only a part of the work."""
        self._shares_batches = shares

    def close(self) -> None:
        self._outside.stop()
        self._end_watch()
        self._listener.stop()
        self._costs.model = None

    def read(self, batch: Any, lengths: Sequence[int] | None) -> Reading:
        """Read the sizes of a batch; its values are checked only if its shape is new."""
        reading = self._reader.read(batch, lengths)
        declared = self._declared.get(id(reading.plan))
        if declared is not None and not self._keeps_example and not declared[1].is_per_batch:
            self._given.append(None)
            return reading
        is_kept = self._keeps_example or (declared is not None and declared[1].is_per_batch)
        if self._costs.model is not None:
            self._given.append(example_batch(self._costs.model, batch, reading.plan) if is_kept else None)
        if declared is None and id(reading.plan) not in self._undeclared:
            self._declare(batch, reading.plan)
            reading = self._reader.read(batch, lengths)  # `_declare` may have changed how mask and positions are read
        return reading

    def _declare(self, batch: Any, plan: BatchLayout) -> None:
        """Remember which model call to expect for batches of layout `plan`, for steps whose calls are not recorded."""
        model = self._costs.model
        if len(self._declared) + len(self._undeclared) >= _MOST_DECLARED:
            self._declared.clear()
            self._undeclared.clear()
        remark = self._reader.check_values(batch, plan)
        if remark:
            self._notify("warning", "positions_not_understood", remark)
        if model is None or self._costs.mode.book is None:
            self._undeclared[id(plan)] = plan
            return
        self._undeclared.clear()
        example = example_batch(model, batch, plan)
        autocast = self._listener.compiled_autocast
        trainable = hash(tuple(p.requires_grad for p in model.parameters()))
        kind = CallKind(describe(example), True, model.training, autocast, trainable, example)
        self._declared[id(plan)] = plan, kind, MADE_UP if is_mask_only(batch) else None

    def look_at_held(self, reading: Reading) -> Reading | None:
        return self._reader.look_at_held(reading)

    def begin_step(self) -> None:
        """Begin a step that the loop has opened; drop earlier calls, and count FLOPs in this step if that is due."""
        if self._is_in_step:  # the next micro-batch of the same step
            return
        self._is_in_step = True
        if not self._opens_steps:
            self._opens_steps = True
            self._known_steps.clear()
        listener = self._listener
        if listener.calls or listener.backwards:
            listener.begin_step()
        self._nodes_before, self._nodes_apart = recorded_operations(), 0
        if self._watches_next or self._steps >= self._plan.not_before:
            self._begin_watch()
        if not listener.is_compiled and not may_compile():  # otherwise torch.compile would compile the hook too
            self._outside.begin()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Say that the step was begun by a hook inside this call of a module, which other hooks have not seen."""
        self._outside.enter(module, args)

    def doubt_calls(self, reason: str) -> None:
        """Say why the calls of this step and of all later ones may not be those of the training step."""
        if self._calls_doubt is None:
            self._calls_doubt = reason
            self._known_steps.clear()

    def abandon_step(self) -> None:
        """Drop the current step, because its body has raised."""
        self._is_in_step = False
        self._outside.end()
        self._end_watch()
        self._listener.begin_step()

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """A context for phases such as evaluation, whose calls of the model belong to no step."""
        was, before = self._listener.is_listening, recorded_operations()
        self._listen(False)
        try:
            yield
        finally:
            self._listen(was)
            if was:  # otherwise this context is inside another one, which adds these operations
                self._nodes_apart += (recorded_operations() or 0) - (before or 0)

    def _listen(self, listens: bool) -> None:
        self._listener.is_listening = self._outside.is_listening = listens
        if self._watched is not None:
            self._watched.set_paused(not listens)

    def _begin_watch(self) -> None:
        costs = self._costs
        if self._watched is not None or costs.waits_for_laws or not costs.can_count:
            return
        if costs.mode.name == "estimate" or not self._steps:
            return
        if not self._plan.take_turn(self._steps, wants_next=self._watches_next):
            return
        self.why_not_watched = self._watch_obstacle()
        if self.why_not_watched is None:
            self._watched = WatchedStep(self._attention)
            self._outside.has_intervals = True
            self._plan.note_watch()

    def _watch_obstacle(self) -> str | None:
        costs = self._costs
        assert costs.mode.book is not None
        if not self._is_alone and (self._shares_batches or is_sharded(costs.model)):
            return SHARED_WORK
        risks = sorted({op for law in costs.mode.book.laws for op in law.mode_risks} | self._met_risks)
        if risks:
            return f"counting steps as they run would change the last bits of the result of {', '.join(risks)}"
        return COMPILED if self._listener.is_compiled else obstacle()

    def _end_watch(self) -> StepCount | None:
        """End the count of the current step and return it; None if the step was not counted."""
        watched, self._watched = self._watched, None
        if watched is None:
            return None
        count = watched.end()
        self._met_risks |= set(count.risks)
        return count

    def end_step(
        self, readings: Sequence[Reading], step: int, settle_earlier_windows: Callable[[], None], loss: Any = None
    ) -> StepCalls:
        """End a step; count the FLOPs of new kinds of calls, and return all calls of the model in the step.

        Args:
            readings: Sizes of the batches that the training loop has passed to the monitor.
            step: The step's number.
            settle_earlier_windows: Called before formulas change, so that no row mixes old and new formulas.
            loss: The step's loss, with its autograd graph.
        """
        self._steps += 1
        self._is_in_step = False
        listener, costs = self._listener, self._costs
        seen, listener.calls = listener.calls, []
        backwards, listener.backwards = listener.backwards, 0
        now, before = recorded_operations(), self._nodes_before
        apart, self._nodes_apart = self._nodes_apart, 0
        outside = self._outside.end()
        if self._outside.intervals:
            outside.add_products(products_outside(loss, self._outside.take_intervals()))
        nodes = None if now is None or before is None else now - before - apart, backwards
        if costs.version != self._known_version:
            self._known_steps.clear()
            self._known_version = costs.version
        if self._watched is None and not self._keeps_example and not listener.unseen:
            known = self._known_steps.get((nodes, outside.sized, *[kind for kind, _ in seen]))
            frequency = costs.check_every
            # A step that checks the FLOP formula needs `_looked_at`. So does the step before it, in which `_looked_at`
            # requests that the arguments of the next calls are kept for the check.
            is_check_near = frequency > 0 and (step + 1) % frequency <= 1
            if known is not None and not is_check_near:
                self._given = []
                self._watches_next = False
                if not self._opens_steps:
                    self._nodes_before = now
                return known
        return self._looked_at(seen, nodes, outside, readings, step, settle_earlier_windows)

    def _looked_at(
        self,
        seen: SeenCalls,
        nodes: tuple[int | None, int],
        outside: OutsideWork,
        readings: Sequence[Reading],
        step: int,
        settle_earlier_windows: Callable[[], None],
    ) -> StepCalls:
        """Return the calls of a step that is not in `_known_steps`; see `end_step`."""
        count, costs = self._end_watch(), self._costs
        if not costs.can_count:
            self._given = []
            return NO_CALLS
        if self._listener.has_been_called:
            costs.see_calls()
        kinds, examples, doubt = self._calls(seen, readings)
        if costs.waits_for_laws:
            costs.keep_waiting(kinds)
            return StepCalls(kinds, (None,) * len(kinds), doubt, count)
        own_prices = tuple(costs.learn(kind, example) for kind, example in zip(kinds, examples, strict=True))
        if kinds:
            self._check(kinds[0], examples[0], step, settle_earlier_windows)
        self._keep_example(costs.needs_example_after(step))
        if count is not None and not seen and not count.phases.total:
            # The count is useless, because the model runs in another process or not at all.
            self._plan.note_futile()
            count = None
        calls = StepCalls(kinds, own_prices, doubt, count, costs.mode.book, costs.certificates, nodes, outside)
        if count is not None:
            self._certify(calls, count, step, calls_are_sure=bool(seen))
        self._watches_next = self._plan.would_another_count_help(calls, costs.certificates, self._steps)
        if not self._opens_steps:
            # Without `step()` no step is counted, because a count that begins in the last `log_step` would never end.
            self._nodes_before, self._nodes_apart = recorded_operations(), 0
            self.why_not_watched = NOT_OPENED
        if self._needs_no_second_look(calls, seen):
            self._remember(calls, seen)
        return calls

    def _check(self, kind: CallKind, example: Any, step: int, settle_earlier_windows: Callable[[], None]) -> None:
        """If a check is due, check the FLOP formulas (laws) with this call; if they are wrong, count FLOPs again."""
        why = self._costs.why_count_anew(kind, example, step)
        if why is not None:
            settle_earlier_windows()
            self._forget_calls()
            self._costs.count_anew(kind, example, why)
        self._reader.read_targets(self._costs.reads_targets)

    def _remember(self, calls: StepCalls, seen: SeenCalls) -> None:
        if len(self._known_steps) >= _MOST_KNOWN_STEPS or self._costs.version != self._known_version:
            self._known_steps.clear()
            self._known_version = self._costs.version
        self._known_steps[(calls.nodes, calls.outside.sized, *[kind for kind, _ in seen])] = calls

    def _needs_no_second_look(self, calls: StepCalls, seen: SeenCalls) -> bool:
        """Whether `calls` can be stored and used for later steps that make the same calls.

        It cannot while the FLOPs of a call are unknown, or while one more such step must be counted as it runs.
        """
        if calls.count is not None or calls.doubt is not None:
            return False
        if self._shares_batches or self._costs.has_changed_settings:
            return False
        if not seen or any(
            example is not None or kind.example is not None or kind.is_per_batch for kind, example in seen
        ):
            return False
        return not self._opens_steps or not self._costs.certificates.needs_another(calls.kind, calls.pattern)

    def look_at_graph(self, calls: StepCalls, loss: Any) -> None:
        """Once per logging window, compare the matrix products in the loss's graph with those of a counted step."""
        products = products_in_graph(loss)
        if products is not None and calls.certificates is not None:
            calls.certificates.look_at_graph(calls.kind, products, is_counted=calls.count is not None)

    def _certify(self, calls: StepCalls, count: StepCount, step: int, *, calls_are_sure: bool) -> None:
        """Compare a step's counted FLOPs with those by formula, and warn if earlier rows of the log may be wrong."""
        if count.optimizer:
            self._notify(*notices.optimizer_products(count.optimizer))
        self._known_steps.clear()
        certificates = self._costs.certificates
        prices = calls.prices(calls.book) if calls.book is not None else None
        is_sure = calls_are_sure and all(price.reason is None for price in prices or ())
        priced = sum((price.executed for price in prices), PhaseFlops()) if prices else None
        was_exact = certificates.verdict(calls.kind, calls.pattern).reason is None
        certificates.add(calls.kind, calls.pattern, priced, count, calls_are_sure=is_sure)
        if was_exact and certificates.verdict(calls.kind, calls.pattern).reason is not None:
            self.doubt = notices.rows_in_doubt(step, self._counted_at.get(calls.pattern))
            self._notify(*self.doubt)
        if len(self._counted_at) < _MOST_DECLARED:
            self._counted_at[calls.pattern] = step
        # `intervals` serve to notice when matrix products outside the model change. While counts find no such products,
        # the number of autograd nodes is enough, because it changes with the first one.
        self._outside.has_intervals = certificates.runs_more

    def _keep_example(self, keeps: bool) -> None:
        """Set whether the next call's arguments and the next batch are kept, to check the FLOP formula with them."""
        self._keeps_example = self._listener.keeps_next = keeps

    def _calls(
        self, seen: SeenCalls, readings: Sequence[Reading]
    ) -> tuple[tuple[CallKind, ...], tuple[Any, ...], str | None]:
        """Return the calls (recorded, or expected from batches), their arguments, and why they are uncertain."""
        if seen and not self._opens_steps:
            # Leave out calls in eval mode without gradients: they are an evaluation between two calls of `log_step`.
            seen = [call for call in seen if call[0].has_grad or call[0].is_training]
        unseen, self._listener.unseen = self._listener.unseen, 0
        given, self._given = self._given, []
        if seen and not (self._shares_batches and readings):
            doubt = f"{unseen} calls of the model have arguments that flopwatch cannot describe" if unseen else None
            doubt = doubt or self._calls_doubt
            return tuple(kind for kind, _ in seen), tuple(example for _, example in seen), doubt
        declared = [self._declared[id(reading.plan)] for reading in readings if id(reading.plan) in self._declared]
        reasons = [reason for _, _, reason in declared if reason] or [
            COMPILED if self._listener.is_compiled else NOT_CALLED
        ]
        kinds = tuple(kind for _, kind, _ in declared)
        examples = tuple(given) if len(given) == len(kinds) else (None,) * len(kinds)
        return kinds, examples, reasons[0]

    def look_at_model(self) -> str | None:
        """Check whether the model has changed in this logging window; return why the FLOPs are not exact, or None."""
        if self._listener.has_been_called:
            self._costs.see_calls()
        change = self._costs.look_at_model()
        if change.is_counted_anew:
            self._forget_calls()
            self._listener.look_at_parameters()
        elif change.needs_example:
            self._keep_example(True)
        return change.doubt

    def _forget_calls(self) -> None:
        """Forget all recorded calls, so that each is recorded again with its arguments and its FLOPs can be counted."""
        self._plan.forget()
        self._listener.forget()
        self._declared.clear()
        self._known_steps.clear()


def checked_flops(flops_fn: Callable[[Any], int], batch: Any) -> int:
    """Call the user's function with a batch; raise if its result is not a positive finite number."""
    flops = flops_fn(batch)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
        raise InputError(f"flops_fn must return a positive finite number of FLOPs, got {flops!r}")
    return int(flops)
