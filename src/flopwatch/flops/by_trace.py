"""Count by following the model's own code with fake tensors: no weights, no device time, the live model untouched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from flopwatch.errors import MeasurementError
from flopwatch.flops.autocast import AutocastState, current_autocast, device_type_of, under_autocast
from flopwatch.flops.batches import as_call
from flopwatch.flops.by_step import copied_batch
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.elsewhere import threads_noticed
from flopwatch.flops.fakes import NEEDS_VALUES, Faker, quiet_fakes
from flopwatch.flops.losses import LossFn
from flopwatch.flops.passes import failures_named, run_step
from flopwatch.flops.replay import Replay, ReplayMemory, ReplayRefusedError
from flopwatch.flops.replica import ModuleStack, replicate
from flopwatch.flops.steering import PythonReads, Steering, following, python_draws, steered
from flopwatch.flops.tally import Tally
from flopwatch.flops.undisturbed import undisturbed
from flopwatch.flops.unfused import WholeAttention
from flopwatch.records import AttentionConvention, FlopCount

WITHOUT_AUTOCAST = "the model could not be followed under autocast, so the types of its products are not known"

_memories: "WeakKeyDictionary[nn.Module, ReplayMemory]" = WeakKeyDictionary()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within, nobody changes the model, and what one trace finds out of its layers need not be found out again."""
    with _memories.setdefault(model, ReplayMemory()).unchanged():
        yield


def count_by_trace(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
    autocast: AutocastState | None = None,
    replay: bool = True,
    memory: ReplayMemory | None = None,
) -> FlopCount:
    """Raise UntraceableError where the model needs values that fake tensors do not have.

    Args:
        model: The live model.
        batch: As `count_flops` takes it.
        attention: The convention for fused attention.
        loss_fn: From the model's output to the loss.
        training: False counts the forward pass alone.
        autocast: The state to run the model under; None takes the one of here and now.
        replay: Run a few of the layers that are equal by structure instead of all; the count is the same.
        memory: What earlier traces have shown of the layers; without one, what those of the same model have.
    """
    state = current_autocast() if autocast is None else autocast
    memory = memory or _memories.setdefault(model, ReplayMemory())
    trace = _Trace(model, batch, state, attention, loss_fn, training, memory)
    try:
        return trace.count(replay=replay)
    except MeasurementError:
        if not state.enabled:
            raise
        # The CPU's autocast leaves other ops in fp32 than an accelerator's, so types may meet that do not fit.
        count = replace(trace, autocast=AutocastState()).count(replay=replay)
        return replace(count, by_dtype={}, notes=(*count.notes, WITHOUT_AUTOCAST))


@dataclass(frozen=True)
class _Trace:
    model: nn.Module
    batch: Any
    autocast: AutocastState
    attention: AttentionConvention
    loss_fn: LossFn | None
    training: bool
    memory: ReplayMemory
    keep_whole: bool = False
    """Whether attention is kept whole where torch would take it apart, which means to look at every call of torch."""

    def count(self, *, replay: bool) -> FlopCount:
        """Follow attention as it is where that will do."""
        if self.attention == "causal" or device_type_of(self.model, self.autocast) != "cpu":
            return replace(self, keep_whole=True)._counted(replay=replay)
        try:
            return self._counted(replay=replay)
        except MeasurementError as error:
            if "FlexAttention" not in str(error):
                raise
            return replace(self, keep_whole=True)._counted(replay=replay)

    def _counted(self, *, replay: bool) -> FlopCount:
        return self._with_replay() if replay and not self.memory.is_refused else self._in_full()

    def _in_full(self) -> FlopCount:
        faker, stack, steering = Faker(), ModuleStack(), Steering()
        mode = CountingMode(stack, self.attention, following(faker.execute, steering))
        self._run(faker, stack, mode, steering, lambda _: None)
        return steered(_told(mode.tally, stack).as_count("trace", self.attention), steering, mode.risky_ops)

    def _with_replay(self) -> FlopCount:
        faker, stack, steering = Faker(), ModuleStack(), Steering()
        replay = Replay(faker, self.memory)
        execute = replay.watch(following(faker.execute, steering))
        mode = CountingMode(stack, self.attention, execute, replay.log)
        try:
            self._run(faker, stack, mode, steering, replay.attach)
            return steered(_told(replay.tally(), stack).as_count("trace", self.attention), steering, mode.risky_ops)
        except Exception as error:
            if replay.failed_like_the_model(error, in_backward=mode.in_backward):
                raise
            self.memory.is_refused = isinstance(error, ReplayRefusedError)
            return self._in_full()

    def _run(
        self,
        faker: Faker,
        stack: ModuleStack,
        mode: CountingMode,
        steering: Steering,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        whole_attention = WholeAttention(mode.add, self.attention) if self.keep_whole else nullcontext()
        autocast = under_autocast(self.autocast, device_type_of(self.model, self.autocast), stand_in=True)
        with undisturbed(), quiet_fakes():
            replica = replicate(self.model, faker.tensor, stack)
            prepare(replica)
            fake_batch = copied_batch(self.batch, faker.tensor)
            steering.name_batch(fake_batch)
            # Without gradients torch's encoder layers run as one op, unless a function mode looks on.
            reads = PythonReads(steering) if self.training else nullcontext()
            noticed = python_draws(steering), reads, threads_noticed(mode.add_threads)
            # Attention is looked at first: what keeps it whole asks who has called it.
            with failures_named(stack, NEEDS_VALUES), noticed[0], noticed[1], noticed[2], whole_attention:
                run_step(replica, *as_call(fake_batch), self.loss_fn, mode, training=self.training, autocast=autocast)


def _told(tally: Tally, stack: ModuleStack) -> Tally:
    for told in stack.told():
        tally.note(told)
    return tally
