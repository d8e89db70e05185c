"""Runs `flopwatch doctor --gpu`: eight checks of an accelerator, each of two figures that come from different places.

Not yet run on an accelerator; the tests run them on the CPU, with what is wrong put in place of what they check.
"""

import getpass
import json
import math
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

from flopwatch.cli import STANDARD_OUTPUT, print_json, say, write_file
from flopwatch.cli.doctor import machine
from flopwatch.cli.doctor.examine import MARKS, CheckResult, NotPossibleError, passed_if, run_check
from flopwatch.clock import monotonic_seconds
from flopwatch.errors import InputError
from flopwatch.hardware import peak_flops, read_device
from flopwatch.hardware.counters.nvml import open_nvml_counters
from flopwatch.hardware.counters.protocol import CounterSource, CountersUnavailableError
from flopwatch.hardware.device import find_device
from flopwatch.hardware.identity import identify
from flopwatch.hardware.measure import matmul_flops, matmul_timer, measure_peak
from flopwatch.hardware.peak_clock import peak_clock_mhz
from flopwatch.hardware.peaks import canonical_dtype
from flopwatch.models.load import load_model
from flopwatch.monitor.counters.values import flops_by_counters
from flopwatch.monitor.timing.tape import timer_for
from flopwatch.monitor.training_monitor import TrainingMonitor
from flopwatch.numbers import byte_size, duration, flop_rate, percent, step_time
from flopwatch.present import document as doc
from flopwatch.present.json_form import strict_json
from flopwatch.present.terminal import print_document
from flopwatch.records.counters import window_of
from flopwatch.text import plural

ISSUES = "https://github.com/flopwatch/flopwatch/issues/new?template=gpu.yml"
_PEAK_SECONDS, _MOST_OF_PEAK = 5.0, 1.05
_MATMUL_SIDE, _SECONDS_BETWEEN_EVENTS = 4096, 0.4
_NEAR, _NEAR_COUNTERS = 0.05, 0.25
_ALLOCATED_BYTES = 256 << 20
_COUNTER_SPANS, _SPAN_SECONDS = 8, 0.3
_ROWS, _SIDE = 256, 1024
_MOST_OWN_SHARE = 0.05
_TWO_RANKS_SECONDS = 120.0


def matmul_rate(device: torch.device) -> CheckResult:
    """The rate of the fastest matmul, against the peak of the datasheet, which it must not exceed."""
    dtype = canonical_dtype(matrix_type(device))
    measured, known = measure_peak(device, dtype, seconds=_PEAK_SECONDS, refresh=True), peak_flops(device, dtype)
    figures = {"measured_flops_per_s": measured.flops_per_s, "dtype": dtype}
    if known is None or known.kind == "measured":
        said = f"{flop_rate(measured.flops_per_s)} in {dtype}, and the peak of this device is not known"
        return CheckResult("not possible", said, figures)
    share = measured.flops_per_s / known.flops_per_s
    said = f"{flop_rate(measured.flops_per_s)} in {dtype}, {percent(share)} of the peak ({known.source})"
    return passed_if(share <= _MOST_OF_PEAK, said, **figures, peak_flops_per_s=known.flops_per_s)


def event_times(device: torch.device) -> CheckResult:
    """The time between two events around matmuls, against the host's clock until the device has done them."""
    dtype, timer = matrix_type(device), timer_for(device, monotonic_seconds)
    calls = _calls_for(_SECONDS_BETWEEN_EVENTS, device)
    left = torch.randn(_MATMUL_SIDE, _MATMUL_SIDE, device=device, dtype=dtype)
    into = torch.mm(left, left)
    _synchronize(device)
    began, first = monotonic_seconds(), timer.mark()
    for _ in range(calls):
        torch.mm(left, left, out=into)
    last = timer.mark()
    _synchronize(device)
    seconds = monotonic_seconds() - began
    if not timer.has_passed(last):
        return CheckResult("failed", "an event has not passed, although the device has done its work")
    by_events = timer.seconds(first, last)
    said = f"{step_time(by_events)} by events, {step_time(seconds)} by the host"
    return passed_if(abs(by_events / seconds - 1) <= _NEAR, said, event_seconds=by_events, host_seconds=seconds)


def flops_of_a_layer(device: torch.device) -> CheckResult:
    """A monitored training of one linear layer: 2 x rows x inputs x outputs forward, as many for the weights."""
    values, steps = _train_layer(torch.nn.Linear(_SIDE, _SIDE, device=device), device), 40
    return _compared(values.get("total/model_flops"), steps * 2 * 2 * _ROWS * _SIDE * _SIDE)


class _Checkpointed(torch.nn.Sequential):
    """Layers that run a second time in the backward pass. The last op needs its result."""

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def recomputation(device: torch.device) -> CheckResult:
    """Activation checkpointing: the executed FLOPs are the model's and one more forward pass of every block."""
    width, blocks, steps = 256, 4, 12
    layers = torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width), torch.nn.ReLU()
    model = torch.nn.Sequential(*(deepcopy(_Checkpointed(*layers)) for _ in range(blocks))).to(device)
    values = _monitored(model, lambda: torch.randn(_ROWS, width, device=device, requires_grad=True), steps)
    recomputed = values["total/hardware_flops"] - values["total/model_flops"]
    return _compared(recomputed, steps * blocks * 2 * 2 * _ROWS * 4 * width * width)


def memory(device: torch.device) -> CheckResult:
    """What torch's allocator reports while bytes are taken and given back."""
    module = getattr(torch, device.type)
    if not hasattr(module, "memory_allocated"):
        raise NotPossibleError(f"torch does not count the memory of a {device.type} device")
    before = module.memory_allocated(device)
    held = torch.empty(_ALLOCATED_BYTES, dtype=torch.uint8, device=device)
    taken, most = module.memory_allocated(device) - before, module.max_memory_allocated(device)
    del held
    left = module.memory_allocated(device) - before
    said = f"{byte_size(taken)} more while {byte_size(_ALLOCATED_BYTES)} are held, {byte_size(left)} after it"
    is_right = taken == _ALLOCATED_BYTES and left == 0 and most >= before + _ALLOCATED_BYTES
    return passed_if(is_right, said, taken_bytes=taken, left_bytes=left, peak_bytes=most)


def nvml(device: torch.device) -> CheckResult:
    """FLOP/s by the activity of the tensor cores and their clock, against those of matmuls whose FLOPs are known."""
    try:
        source = open_nvml_counters(identify(device))
    except CountersUnavailableError as error:
        raise NotPossibleError(str(error)) from error
    try:
        return _counted_matmuls(device, source)
    finally:
        source.close()


def _counted_matmuls(device: torch.device, source: CounterSource) -> CheckResult:
    run, facts, shape = matmul_timer(device, matrix_type(device)), read_device(device), (_MATMUL_SIDE,) * 3
    calls = _calls_for(_SPAN_SECONDS, device)
    before, readings = source.sample(), []
    for _ in range(_COUNTER_SPANS):
        run(shape, calls)
        readings.append(source.sample())
    window = window_of(readings, before)
    assert window is not None  # it has readings
    rate = _COUNTER_SPANS * calls * matmul_flops(shape) / window.seconds
    peak, figures = peak_flops(facts, matrix_type(device)), {**asdict(window), "matmul_flops_per_s": rate}
    shown = flops_by_counters(window, None if peak is None else peak.flops_per_s, peak_clock_mhz(facts))
    if shown is None:
        return CheckResult("not possible", f"{window.source} does not show the activity of the tensor cores", figures)
    said = f"{flop_rate(shown)} by {window.source}, {flop_rate(rate)} by count"
    is_near = 1 / (1 + _NEAR_COUNTERS) <= shown / rate <= 1 + _NEAR_COUNTERS
    return passed_if(is_near, said, **figures, counter_flops_per_s=shown)


def cost_of_monitoring(device: torch.device) -> CheckResult:
    """The monitor takes less than 5 % of the time of an ordinary step of a tiny model, which is not counted."""
    model = load_model("tiny", device="cpu").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1000, (4, 64), device=device)
    seconds, own = list[float](), [0.0]
    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, peak_flops_per_s=1e12, quiet=True) as monitor:
        monitor.set_model(model)
        for number in range(40):
            began = monotonic_seconds()
            loss = model(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(monotonic_seconds() - began)
            monitor.log_step(number, loss=loss, batch={"input_ids": ids, "labels": ids})
            own.append(monitor.own_seconds + monitor.thread_cpu_seconds)
    each, whole = median(after - before for before, after in pairwise(own)), median(seconds)
    said = f"{1e6 * each:.0f} µs in an ordinary step of {step_time(whole)} of a tiny model: {percent(each / whole)}"
    return passed_if(each / whole < _MOST_OWN_SHARE, said, own_seconds_per_step=each, step_seconds=whole)


def two_ranks(device: torch.device) -> CheckResult:
    """Two ranks train on two devices: their sum is right, and the monitor adds up the FLOPs of both."""
    count = torch.accelerator.device_count()
    if device.type != "cpu" and count < 2:
        raise NotPossibleError(f"it needs two devices, and this machine has {count}")
    with tempfile.TemporaryDirectory() as folder:
        started, ends = spawn(_train_as_rank, (device.type, folder), nprocs=2, join=False), monotonic_seconds()
        while not started.join(timeout=1.0):
            if monotonic_seconds() > ends + _TWO_RANKS_SECONDS:
                for process in started.processes:
                    process.kill()
                raise TimeoutError(f"two ranks did not end within {_TWO_RANKS_SECONDS:.0f} s; a collective may hang")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    checked = _compared(found.get("total/model_flops"), 2 * 40 * 2 * 2 * _ROWS * _SIDE * _SIDE)
    is_right = checked.outcome == "passed" and found["sum"] == 3
    return passed_if(is_right, checked.said, **checked.figures, sum_of_ranks=found["sum"])


def _train_as_rank(rank: int, kind: str, folder: str) -> None:
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    # Without a name, torch takes the backend of each device, such as nccl.
    torch.distributed.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(_SIDE, _SIDE, device=device))
        values = _train_layer(model, device, str(Path(folder, "run")))
        total = torch.full((1,), rank + 1.0, device=device)
        torch.distributed.all_reduce(total)
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps({**values, "sum": total.item()}), "utf-8")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


CHECKS: Mapping[str, Callable[[torch.device], CheckResult]] = {
    "matmul rate": matmul_rate,
    "event times": event_times,
    "FLOPs of a layer": flops_of_a_layer,
    "recomputation": recomputation,
    "memory": memory,
    "NVML": nvml,
    "cost of monitoring": cost_of_monitoring,
    "two ranks": two_ranks,
}


def show_gpu(output: str, *, as_json: bool, device: torch.device | None = None) -> int:
    """Run the checks of the current accelerator, write their file and print them; returns the exit status."""
    used = _accelerator() if device is None else device
    if output == STANDARD_OUTPUT or not Path(output).expanduser().absolute().parent.is_dir():
        raise InputError(f"cannot write {output!r}; name a file in a folder that exists, or print with --json")
    results: list[CheckResult] = []
    found: dict[str, Any] = {}
    try:
        for name, check in CHECKS.items():
            if sys.stderr.isatty():
                say(f"{len(results) + 1} of {len(CHECKS)}: {name}", err=True)
            results.append(run_check(name, partial(check, used)))
            # After each check, so that the others are not lost if the device hangs.
            found = _content(used, results)
            write_file(output, f"{strict_json(found, indent=2)}\n")
    except KeyboardInterrupt:
        say(f"Stopped after {len(results)} of {len(CHECKS)} checks; what they found is in {output}", err=True)
        raise click.Abort from None
    if as_json:
        print_json(found)
    else:
        print_document(_document(read_device(used).name, results, output))
    return int(any(result.outcome == "failed" for result in results))


def _content(device: torch.device, results: Sequence[CheckResult]) -> dict[str, Any]:
    """What the file holds, without the names of this host and of the user, and without the user's folder."""
    found = {
        "format": 1,
        "kind": "flopwatch doctor --gpu",
        "is_complete": len(results) == len(CHECKS),
        "versions": machine.versions(),
        "device": asdict(read_device(device)),
        "checks": [asdict(result) for result in results],
    }
    text = strict_json(found)
    for name in (str(Path.home()), socket.gethostname(), getpass.getuser()):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "<private>", text, flags=re.IGNORECASE)
    nameless: dict[str, Any] = json.loads(text)
    return nameless


def _document(device: str, results: Sequence[CheckResult], path: str) -> doc.Document:
    rows = [(MARKS[each.outcome], each.name, doc.Cell(each.said), duration(each.seconds)) for each in results]
    failed = [result.name for result in results if result.outcome == "failed"]
    possible = sum(result.outcome != "not possible" for result in results)
    verdict = doc.Text(f"{possible - len(failed)} of {plural(possible, 'check')} passed on {device}.", "ok")
    if failed:
        verdict = doc.Text(f"{plural(len(failed), 'check')} failed on {device}: {', '.join(failed)}", "failed")
    told = doc.Text(
        f"Written to {path}. flopwatch was written without a GPU, so every result, good or bad, is news. The names of "
        "this host and of the user are replaced; a message may have other paths, so look into the file. To send it:"
    )
    grid = doc.Grid(["", "", "", *doc.numbers("")], rows)
    return doc.Document("", [doc.Section("Checks", [grid, verdict, told, doc.Text(ISSUES, "command")])])


def _accelerator() -> torch.device:
    device = find_device()
    if device.type == "cpu":
        raise InputError(
            f"flopwatch doctor --gpu needs an accelerator, and torch {torch.__version__}, built for "
            f"{machine.built_for()}, finds none; run it on a machine with a GPU and a torch that was built for it: "
            "https://pytorch.org/get-started"
        )
    return device


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matrix_type(device: torch.device) -> torch.dtype:
    """NVIDIA devices before compute capability 8.0 have tensor cores for fp16 only."""
    return torch.float16 if (read_device(device).compute_capability or (8, 0)) < (8, 0) else torch.bfloat16


def _calls_for(seconds: float, device: torch.device) -> int:
    """How many matmuls of one size take so long."""
    run = matmul_timer(device, matrix_type(device))
    return math.ceil(seconds / min(run((_MATMUL_SIDE,) * 3, 1) for _ in range(3)))


def _train_layer(model: torch.nn.Module, device: torch.device, folder: str | None = None) -> dict[str, Any]:
    return _monitored(model, lambda: torch.randn(_ROWS, _SIDE, device=device), 40, folder)


def _monitored(
    model: torch.nn.Module, next_batch: Callable[[], torch.Tensor], steps: int, folder: str | None = None
) -> dict[str, Any]:
    """Train so many steps with the monitor, and return the values of its summary."""
    with tempfile.TemporaryDirectory() as own:
        monitor = TrainingMonitor(folder or own, model=model, strict=True, quiet=True)
        with monitor:
            for number in range(steps):
                batch = next_batch()
                loss = model(batch).sum()
                loss.backward()
                monitor.log_step(number, loss=loss, batch=batch)
    return dict(monitor.summary.values) if monitor.summary else {}


def _compared(counted: float | None, expected: int) -> CheckResult:
    if counted is None:
        return CheckResult("failed", "the monitor knows no FLOPs of this training", {"expected_flops": expected})
    said = f"{counted:,.0f} FLOPs counted, {expected:,} by hand"
    return passed_if(counted == expected, said, counted_flops=counted, expected_flops=expected)
