"""The checks of `flopwatch doctor` that need no accelerator; `--gpu` runs them on the accelerator."""

import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

import torch

from flopwatch.cli.doctor.findings import Checked, NotPossibleError, passed_if
from flopwatch.clock import monotonic_seconds
from flopwatch.flops.count import count_flops
from flopwatch.models.load import load_model
from flopwatch.monitor.training_monitor import TrainingMonitor
from flopwatch.numbers import percent, step_time

_STEPS = 40
_BATCH_SIZE, _SEQ_LEN = 4, 64
_MOST_OWN_SHARE = 0.05


def count_of_a_layer(device: str = "cpu") -> Checked:
    """A linear layer's FLOPs: 2 x samples x inputs x outputs forward, and as many for the weights' gradient."""
    layer, batch = torch.nn.Linear(64, 32, device=device), torch.randn(8, 64, device=device)
    counted, expected = count_flops(layer, batch).model_flops, 2 * (2 * 8 * 64 * 32)
    said = f"{counted:,} counted, {expected:,} by hand"
    return passed_if(counted == expected, said, counted_flops=counted, expected_flops=expected)


def monitored_training(device: str = "cpu") -> Checked:
    """Parameters are bitwise equal with and without the monitor, and the monitor's FLOPs are right."""
    bare, *_ = train(device)
    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, strict=True, peak_flops_per_s=1e12, quiet=True)
        with monitor:
            watched, *_ = train(device, monitor)
    expected = count_flops(bare, _batch(device)).model_flops * _STEPS
    total = monitor.summary.values.get("total/model_flops") if monitor.summary else None
    figures = {"steps": _STEPS, "monitored_flops": total, "expected_flops": expected}
    if total != expected:
        return Checked("failed", f"{total or 0:,} FLOPs in {_STEPS} steps, {expected:,} expected", figures)
    if _are_equal(watched, bare):
        said = f"{_STEPS} steps, {total:,} FLOPs, parameters bitwise equal with and without the monitor"
        return Checked("passed", said, {**figures, "bitwise_equal": True})
    again, *_ = train(device)
    if not _are_equal(again, bare):
        raise NotPossibleError("without the monitor, two trainings are not bitwise equal on this device either")
    said = "the monitored training ends with other parameters than the same training without the monitor"
    return Checked("failed", said, {**figures, "bitwise_equal": False})


def cost_of_monitoring(device: str = "cpu") -> Checked:
    """The monitor takes less than 5 % of the time of an ordinary step of a tiny model, which is not counted."""
    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, peak_flops_per_s=1e12, quiet=True) as monitor:
        _, seconds, own_seconds = train(device, monitor)
    own, whole = median(own_seconds), median(seconds)
    said = f"{1e6 * own:.0f} µs in an ordinary step of {step_time(whole)} of a tiny model: {percent(own / whole)}"
    return passed_if(own / whole < _MOST_OWN_SHARE, said, own_seconds_per_step=own, step_seconds=whole)


CHECKS: Mapping[str, Callable[[], Checked]] = {
    "FLOPs of a known layer": count_of_a_layer,
    "monitored training": monitored_training,
    "cost of monitoring": cost_of_monitoring,
}


def _are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def _batch(device: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(_BATCH_SIZE * _SEQ_LEN, device=device).reshape(_BATCH_SIZE, _SEQ_LEN) % 1000
    return {"input_ids": ids, "labels": ids}


def train(device: str, monitor: TrainingMonitor | None = None) -> tuple[torch.nn.Module, list[float], list[float]]:
    """Train a tiny model. Returns the model, and the seconds of each step: the training's and the monitor's own."""
    seconds: list[float] = []
    own_seconds = [0.0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = load_model("tiny", device="cpu").to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if monitor is not None:
            monitor.set_model(model)
        for number in range(_STEPS):
            began = monotonic_seconds()
            batch = _batch(device)
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(monotonic_seconds() - began)
            if monitor is not None:
                monitor.log_step(number, 0, loss, None, 1e-3, batch=batch)
                own_seconds.append(monitor.own_seconds + monitor.thread_cpu_seconds)
    return model, seconds, [after - before for before, after in pairwise(own_seconds)]
