"""The checks of `flopwatch selftest`: each returns whether it passed, and what was found."""

import tempfile
from itertools import pairwise
from statistics import median

import torch

from flopwatch.clock import monotonic_seconds
from flopwatch.flops.count import count_flops
from flopwatch.models.load import load_model
from flopwatch.monitor.training_monitor import TrainingMonitor

_STEPS = 40
_BATCH_SIZE, _SEQ_LEN = 4, 64


def _check_count() -> tuple[bool, str]:
    """Check a linear layer's FLOPs: 2 x samples x inputs x outputs forward, and as many for the weights' gradient."""
    counted = count_flops(torch.nn.Linear(64, 32), torch.randn(8, 64)).model_flops
    expected = 2 * (2 * 8 * 64 * 32)
    return counted == expected, f"{counted:,} counted, {expected:,} by hand"


def _check_monitor() -> tuple[bool, str]:
    """Check that parameters are bitwise equal with and without the monitor, and that the monitor's FLOPs are right."""
    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, strict=True, peak_flops_per_s=1e12, quiet=True)
        with monitor:
            watched, *_ = _train(monitor)
        bare, *_ = _train(None)
    equal = all(torch.equal(a, b) for a, b in zip(watched.parameters(), bare.parameters(), strict=True))
    expected = count_flops(bare, _batch()).model_flops * _STEPS
    total = monitor.summary.values.get("total/model_flops") if monitor.summary else None
    detail = f"{_STEPS} steps, {total:,} FLOPs, parameters {'bitwise equal' if equal else 'CHANGED'} with and without"
    return equal and total == expected, detail


def _check_cost() -> tuple[bool, str]:
    """Check that the monitor takes less than 5 % of the time of an ordinary step, which is not counted."""
    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, peak_flops_per_s=1e12, quiet=True) as monitor:
        _, seconds, own_seconds = _train(monitor)
    own, step_seconds = median(own_seconds), median(seconds)
    return own / step_seconds < 0.05, f"{1e6 * own:.0f} µs in an ordinary step of {1e3 * step_seconds:.1f} ms"


CHECKS = {
    "FLOPs of a known layer": _check_count,
    "monitored training": _check_monitor,
    "cost of monitoring": _check_cost,
}


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(_BATCH_SIZE * _SEQ_LEN).reshape(_BATCH_SIZE, _SEQ_LEN) % 1000
    return {"input_ids": ids, "labels": ids}


def _train(monitor: TrainingMonitor | None) -> tuple[torch.nn.Module, list[float], list[float]]:
    """Train a tiny model. Returns the model, and the seconds of each step: the training's and the monitor's own."""
    seconds: list[float] = []
    own_seconds = [0.0]
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
            seconds.append(monotonic_seconds() - began)
            if monitor is not None:
                monitor.log_step(number, 0, loss, None, 1e-3, batch=batch)
                own_seconds.append(monitor.own_seconds + monitor.thread_cpu_seconds)
    return model, seconds, [after - before for before, after in pairwise(own_seconds)]
