"""One rank of a training: reports each logging window to the rank that writes the log, which merges all reports."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from statistics import median

import torch
import torch.distributed as dist

from flopwatch.language import Said
from flopwatch.monitor import notices
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.notices import Notify
from flopwatch.monitor.ranks.exchange import RankLink
from flopwatch.monitor.ranks.job_store import RunKey
from flopwatch.monitor.ranks.layout import device_identity, ranks_by_launcher
from flopwatch.monitor.ranks.reports import RankDoubt, Window, report_of

_runs_of: Counter[int] = Counter()
"""Number of runs that monitors of this process have joined, by logging rank."""
_runs_in: Counter[str] = Counter()
"""Number of runs that monitors of this process have joined, by log path."""
_known_logs: set[str] = set()
"""Log path of each run of this process, plus `/` and a number, because several runs may write to one path."""
_MOST_INCOMPLETE = 200
"""The logging rank keeps up to this many windows while it waits for other ranks; then it continues without them."""


class Rank:
    """One of the `world_size` ranks of a training: this process.

    Attributes:
        link: The link to the other ranks; None with one rank, before the run starts, and after the link has failed.
        has_started: Whether the first step has ended.
        is_off: Whether this rank has stopped reporting to the logging rank.
        may_wait: Whether a checkpoint may wait for other ranks; False once it has waited in vain.
        waits_in_forward: Whether forward passes may wait for other ranks, as those of sharded models do.
        window_steps: Steps per window by the logging rank's plan; None until the plan arrives.
    """

    def __init__(self, rank: int, world_size: int, logging_rank: int, notify: Notify) -> None:
        self.rank = rank
        self.world_size = world_size
        self._logging_rank = logging_rank
        self._notify = notify
        self.link: RankLink | None = None
        self.has_started = self.is_off = False
        self.may_wait = True
        self.waits_in_forward = False
        self.window_steps: int | None = None
        self._device_type = "cpu"
        self._incomplete: deque[Window] = deque()

    def start(self, log: str, device: torch.device) -> None:
        """Start the link to the other ranks of this run, without waiting for them."""
        self.has_started, self._device_type = True, device.type
        if self.world_size == 1:
            return
        if not (dist.is_available() and dist.is_initialized()):
            self.is_off = not self.is_logging
            self._notify(*notices.notice("ranks_unknown", rank=self.rank, world_size=self.world_size))
            return
        _runs_of[self._logging_rank] += 1
        _runs_in[log] += 1
        numbered, by_launcher = f"{log}/{_runs_in[log]}", ranks_by_launcher(device.type)
        _known_logs.add(numbered)
        key = RunKey(self._logging_rank, _runs_of[self._logging_rank], numbered, _known_logs)
        self.link = RankLink(key, self.rank, self.world_size, device_identity(device), by_launcher)

    @property
    def is_logging(self) -> bool:
        return self.rank == self._logging_rank

    @property
    def ranks_on_device(self) -> int:
        """How many ranks compute on this rank's device; until they are counted, as many as the launcher says."""
        if self.world_size == 1:
            return 1
        counted = None if self.link is None else self.link.ranks_on_device
        return ranks_by_launcher(self._device_type) if counted is None else counted

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have sent all windows that this rank has sent."""
        return not self._incomplete

    @property
    def waits_for_plan(self) -> bool:
        return not self.is_logging and self.window_steps is None

    @property
    def cpu_seconds(self) -> float:
        return 0.0 if self.link is None else self.link.cpu_seconds

    def plan(self, steps: Sequence[MeasuredStep], log_every: int, log_seconds: float) -> None:
        """On the logging rank, send the steps per logging window to the other ranks, once."""
        if self.link is None or not self.is_logging or self.window_steps is not None:
            return
        seconds = [step.seconds for step in steps if step.seconds and not step.is_warm_up]
        self.window_steps = window_steps(median(seconds) if seconds else None, log_every, log_seconds)
        self.link.announce(self.window_steps)

    def send_window(self, window: Window, peak_flops_per_s: float | None) -> None:
        """Send the report of a window; the logging rank keeps its own steps until all ranks have sent their reports."""
        if self.is_logging:
            self._incomplete.append(window)
        if self.link is not None:
            report = report_of(
                self.rank,
                window.steps,
                peak_flops_per_s=peak_flops_per_s,
                waits_in_forward=self.waits_in_forward,
                counter_values=window.counter_values,
            )
            self.link.send(report)

    def doubt(self, first_step: int) -> None:
        """Tell the logging rank that steps from this one on are not exact on this rank, although they were sent so."""
        if self.link is not None and not self.is_logging:
            self.link.add_doubt(RankDoubt(first_step, self.rank))

    def take_doubt(self) -> RankDoubt | None:
        """On the logging rank, the earliest doubt of other ranks since the last call; None without one."""
        return self.link.take_doubt() if self.link is not None and self.is_logging else None

    def complete(self, *, give_up: bool = False) -> Iterator[Window]:
        """On the logging rank, yield the windows that all ranks have sent; with `give_up`, incomplete ones too."""
        link = self.link
        if link is not None:
            while link.merged:
                report = link.merged.popleft()
                own: list[Window] = []
                while self._incomplete and self._incomplete[0].steps[-1].step <= report.last_step:
                    own.append(self._incomplete.popleft())
                if own:  # there are none if the monitor has failed on this rank only
                    steps = tuple(step for window in own for step in window.steps)
                    counters = tuple(each for window in own for each in window.counters)
                    yield Window(steps, report, counters, own[-1].counter_values)
            if link.failure is not None:
                self._leave_because(Said("the connection to the other ranks has failed: {why}", why=link.failure))
            elif len(self._incomplete) > _MOST_INCOMPLETE:
                self._leave_because(
                    Said("the other ranks have sent nothing for {windows} windows", windows=_MOST_INCOMPLETE)
                )
        while self._incomplete and (self.link is None or give_up):
            yield self._incomplete.popleft()

    def finish(self, seconds: float) -> None:
        """End this rank's reports and wait at most `seconds` for the other ranks."""
        if self.link is None:
            return
        is_in_time = self.link.finish(seconds)
        if self.is_logging and self.link.absent:
            self._notify(*notices.ranks_absent(self.link.absent))
        elif self.is_logging and not is_in_time:
            self._notify(*notices.notice("ranks_late", seconds=seconds))

    def leave(self) -> None:
        """Stop exchanging reports with other ranks, without waiting."""
        self.is_off = not self.is_logging
        if self.link is not None:
            self.link.give_up()

    def _leave_because(self, why: str) -> None:
        if self.is_logging:
            self._notify(*notices.notice("ranks_lost", rank=self.rank, why=why))
        self.leave()
        self.link = None


def window_steps(step_seconds: float | None, log_every: int, log_seconds: float) -> int:
    """The largest number of steps that divides `log_every` and takes at most `log_seconds`; at least 1.

    >>> window_steps(0.2, 50, 10.0), window_steps(0.9, 50, 10.0), window_steps(60.0, 50, 10.0)
    (50, 10, 1)
    """
    if step_seconds is None or step_seconds <= 0:
        return log_every
    divisors = [steps for steps in range(1, log_every + 1) if log_every % steps == 0]
    return max([steps for steps in divisors if steps * step_seconds <= log_seconds], default=1)


def ends_window(step: int, previous: int | None, window_steps: int) -> bool:
    """Whether a window ends with this step. Step numbers can have gaps, so `previous` gives the step before.

    >>> ends_window(49, 48, 50), ends_window(50, 49, 50), ends_window(1024, 512, 50)
    (True, False, True)
    """
    before = step if previous is None else previous + 1
    return (step + 1) // window_steps != before // window_steps
