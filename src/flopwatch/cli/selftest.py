"""The checks of `flopwatch selftest`: the count, the monitor, and the cost of monitoring."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from flopwatch.clock import monotonic_seconds
from flopwatch.flops.count import count_flops
from flopwatch.models.load import load_model
from flopwatch.monitor.training_monitor import TrainingMonitor

_STEPS = 40
_BATCH_SIZE, _SEQ_LEN = 4, 64


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its name, whether it passed, and the figures."""

    name: str
    passed: bool
    detail: str


def run_checks() -> Iterator[Check]:
    """Yields the result of each check; all of them take about ten seconds."""
    for check in (check_count, check_monitor, check_cost):
        try:
            yield check()
        except Exception as error:
            yield Check(check.__name__, False, f"{type(error).__name__}: {error}")


def check_count() -> Check:
    """A linear layer costs 2 x samples x inputs x outputs forward, and the same for its weight's gradient."""
    counted = count_flops(torch.nn.Linear(64, 32), torch.randn(8, 64)).model_flops
    expected = 2 * (2 * 8 * 64 * 32)
    return Check("FLOPs of a known layer", counted == expected, f"{counted:,} counted, {expected:,} by hand")


def check_monitor() -> Check:
    """A training has bit for bit the same weights with and without the monitor, and every step has FLOPs."""
    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, strict=True, peak_flops_per_s=1e12)
        with monitor:
            watched = _train(monitor)
        bare = _train(None)
    equal = all(torch.equal(a, b) for a, b in zip(watched.parameters(), bare.parameters(), strict=True))
    priced = count_flops(bare, _batch()).model_flops * _STEPS
    total = monitor.summary.values.get("total/model_flops") if monitor.summary else None
    detail = f"{_STEPS} steps, {total:,} FLOPs, parameters {'bitwise equal' if equal else 'CHANGED'} with and without"
    return Check("monitored training", equal and total == priced, detail)


def check_cost() -> Check:
    """The monitor's own time is below 5 % of the step time."""
    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, peak_flops_per_s=1e12) as monitor:
        seconds: list[float] = []
        _train(monitor, seconds.append)
        own = (monitor.own_seconds + monitor.thread_cpu_seconds) / _STEPS
    share = own / median(seconds)
    return Check("cost of monitoring", share < 0.05, f"{1e6 * own:.0f} µs per step of {1e3 * median(seconds):.1f} ms")


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(_BATCH_SIZE * _SEQ_LEN).reshape(_BATCH_SIZE, _SEQ_LEN) % 1000
    return {"input_ids": ids, "labels": ids}


def _train(
    monitor: TrainingMonitor | None, report_seconds: Callable[[float], None] = lambda seconds: None
) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = load_model("tiny", device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if monitor is not None:
            monitor.set_model(model)
        for number in range(_STEPS):
            began = monotonic_seconds()
            batch = _batch()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report_seconds(monotonic_seconds() - began)
            if monitor is not None:
                monitor.log_step(number, 0, loss, None, 1e-3, batch=batch)
    return model
