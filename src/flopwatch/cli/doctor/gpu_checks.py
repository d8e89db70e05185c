"""The checks of `flopwatch doctor --gpu`, in their order, and the run of all of them within five minutes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from flopwatch.cli.doctor import gpu_times, gpu_training
from flopwatch.cli.doctor.accelerator import Accelerator
from flopwatch.cli.doctor.findings import Checked, CheckResult, NotPossibleError, run_check
from flopwatch.clock import Clock, monotonic_seconds

_MOST_SECONDS = 300.0
Check = Callable[[Accelerator], Checked]

CHECKS: Mapping[str, Check] = {
    "product": gpu_times.product,
    "FLOPs of a linear layer": gpu_training.flops_of_a_layer,
    "FLOPs of a transformer": gpu_training.flops_of_a_transformer,
    "recomputation": gpu_training.recomputation,
    "monitored training": gpu_training.monitored_training,
    "times by events": gpu_times.times_by_events,
    "times by a trace": gpu_times.times_by_a_trace,
    "step time of the monitor": gpu_training.time_of_a_step,
    "device memory": gpu_times.memory,
    "hardware counters": gpu_times.counters,
    **gpu_times.PEAKS,
    "cost of monitoring": gpu_training.cost_of_monitoring,
    "two ranks": gpu_training.two_ranks,
}


def run_all(
    accelerator: Accelerator,
    tell: Callable[[str], object] = lambda name: None,
    checks: Mapping[str, Check] = CHECKS,
    clock: Clock = monotonic_seconds,
) -> Iterator[CheckResult]:
    """Run one check after the other; `tell` gets the name of each before it. If no time is left, it is not possible."""
    began = clock()
    for name, check in checks.items():
        tell(name)
        has_time = clock() - began < _MOST_SECONDS
        yield run_check(name, partial(check if has_time else _no_time_is_left, accelerator), clock)


def _no_time_is_left(accelerator: Accelerator) -> Checked:
    raise NotPossibleError(f"the checks before it took {_MOST_SECONDS / 60:.0f} minutes")
