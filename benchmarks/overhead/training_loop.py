"""The training loop that is run in turns bare and watched, in one process."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from flopwatch.models.load import Decoder
from flopwatch.models.presets import Preset
from overhead.intervals import Block, Pair

SEED = 0
LEARNING_RATE = 1e-4
LOG_EVERY = 50
"""Steps between two rows, for everybody who has a choice: flopwatch's and Lightning's default."""
WARM_UP_STEPS = 12


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    sizes: Preset
    seq_len: int
    batch_size: int = 1


LARGE = Size(Preset(1_000, 256, 4, 8), seq_len=128)
"""For steps of about 200 ms: mostly matrix products, which the machine's other work disturbs least."""
SMALL = Size(Preset(1_000, 128, 2, 4), seq_len=64)
"""For steps of 20 to 50 ms, so that every 500th step comes round."""


class Training:
    """A transformer that learns one batch by heart."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(SEED)
        self.size = size
        self.model: nn.Module = Decoder(size.sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        ids = torch.randint(0, size.sizes.vocab_size, (size.batch_size, size.seq_len))
        self.batch = {"input_ids": ids, "labels": ids.clone()}
        self.attention_mask = torch.ones_like(ids)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.batch)["loss"]
        return loss

    def finish(self, loss: torch.Tensor) -> torch.Tensor:
        """Everything after the forward pass; returns the gradient's norm."""
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return grad_norm

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step; returns the loss and the gradient's norm."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        return loss, self.finish(loss)


@dataclass(frozen=True)
class Contender:
    """One way to run the loop.

    Attributes:
        step: Runs the training step of this number, watched.
        apart: What holds while others have their turn.
        get_ready: Called once after the warm-up.
        close: Called once at the end.
    """

    step: Callable[[int], object]
    apart: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    get_ready: Callable[[], object] = field(default=lambda: None)
    close: Callable[[], object] = field(default=lambda: None)


Makers = Mapping[str, Callable[[], Contender]]


@dataclass(frozen=True)
class Timings:
    """What came out of a run.

    Attributes:
        pairs: Seconds of the steps without and with, per contender and repeat.
        start_seconds: From nothing to the end of the first step, per contender.
        failures: Why a contender does not take part.
    """

    pairs: dict[str, list[Pair]]
    start_seconds: dict[str, float]
    failures: dict[str, str]


@dataclass(frozen=True)
class Schedule:
    """How often: `repeats` times `steps` steps without and with, in turns of `turn` steps each."""

    repeats: int
    steps: int
    turn: int = 5


def interleave(training: Training, makers: Makers, schedule: Schedule) -> Timings:
    """Run each contender in turns with the bare loop; which comes first changes from turn to turn.

    Short turns, because the mood of a shared machine changes within seconds.

    Args:
        training: The bare loop.
        makers: Start a contender each; the others are apart while they do. One that raises is left out.
        schedule: How often.
    """
    contenders, start_seconds, failures = _started(makers)
    pairs: dict[str, list[Pair]] = {name: [] for name in contenders}
    for repeat in range(schedule.repeats):
        for name, contender in contenders.items():
            gc.collect()  # nobody sweeps up after another
            with _apart(other for key, other in contenders.items() if key != name):
                pairs[name].append(_repeat(training, contender, schedule, repeat))
    for contender in contenders.values():
        contender.close()
    return Timings(pairs, start_seconds, failures)


def _repeat(training: Training, contender: Contender, schedule: Schedule, repeat: int) -> Pair:
    without: Block = []
    watched: Block = []

    def run_bare(numbers: range) -> None:
        with contender.apart():
            without.extend(_run(lambda number: training.step(), numbers))

    def run_watched(numbers: range) -> None:
        watched.extend(_run(contender.step, numbers))

    first = WARM_UP_STEPS + repeat * schedule.steps
    for turn, start in enumerate(range(first, first + schedule.steps, schedule.turn)):
        numbers = range(start, min(start + schedule.turn, first + schedule.steps))
        is_bare_first = (turn + repeat) % 2 == 0
        for run in (run_bare, run_watched) if is_bare_first else (run_watched, run_bare):
            run(numbers)
    return without, watched


def _started(makers: Makers) -> tuple[dict[str, Contender], dict[str, float], dict[str, str]]:
    contenders: dict[str, Contender] = {}
    start_seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, make in makers.items():
        with _apart(contenders.values()):
            try:
                before = time.perf_counter()
                contender = make()
                contender.step(0)
                start_seconds[name] = time.perf_counter() - before
                _run(contender.step, range(1, WARM_UP_STEPS))
                contender.get_ready()
            except Exception as error:
                failures[name] = described(error)
                continue
        contenders[name] = contender
    return contenders, start_seconds, failures


@contextmanager
def _apart(others: Iterable[Contender]) -> Iterator[None]:
    with ExitStack() as stack:
        for other in others:
            stack.enter_context(other.apart())
        yield


def _run(step: Callable[[int], object], numbers: Iterable[int]) -> Block:
    ticks = [time.perf_counter()]
    for number in numbers:
        step(number)
        ticks.append(time.perf_counter())
    return [after - before for before, after in pairwise(ticks)]


def described(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"


def calibrated(size: Size, target_seconds: float) -> Size:
    """The size with the batch whose step takes about as long as wanted, on this machine, now."""
    few, many = 2, 8
    seconds = {batch_size: _step_seconds(size, batch_size) for batch_size in (few, many)}
    per_sample = (seconds[many] - seconds[few]) / (many - few)
    samples = few + (target_seconds - seconds[few]) / max(per_sample, 1e-6)
    return Size(size.sizes, size.seq_len, max(1, round(samples)))


def _step_seconds(size: Size, batch_size: int) -> float:
    training = Training(Size(size.sizes, size.seq_len, batch_size))
    return statistics.median(_run(lambda number: training.step(), range(15))[5:])
