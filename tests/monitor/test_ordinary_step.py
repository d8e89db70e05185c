"""On an ordinary step the monitor reads nothing from a device, writes nothing, sends nothing and waits for nobody."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flopwatch import TrainingMonitor
from flopwatch.models.load import Decoder
from flopwatch.models.presets import PRESETS
from support.forbidden_calls import forbidden_calls

pytestmark = pytest.mark.slow

LOG_EVERY = 10
FIRST_ORDINARY = 4
"""The model has been counted by then, and everything is loaded."""

Feed = Callable[[TrainingMonitor, "Loop", int], None]


class Loop:
    """A real training, of which the guard sees the monitor's part only."""

    def __init__(self) -> None:
        self.model = Decoder(PRESETS["tiny"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ids = torch.randint(0, 1000, (2, 16))
        self.batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        self.loss = torch.zeros(())
        self.grad_norm = torch.zeros(())

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.loss = self.model(self.batch["input_ids"], self.batch["labels"])["loss"]
        self.loss.backward()
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def with_attention_mask(monitor: TrainingMonitor, loop: Loop, step: int) -> None:
    monitor.log_step(step, 0, loop.loss, loop.grad_norm, 0.1, loop.batch["attention_mask"])


def with_batch(monitor: TrainingMonitor, loop: Loop, step: int) -> None:
    monitor.log_step(step, 0, loop.loss, loop.grad_norm, 0.1, batch=loop.batch, temperature=loop.loss)


def with_context(monitor: TrainingMonitor, loop: Loop, step: int) -> None:
    with monitor.step(loop.batch) as current:
        current.log(loss=loop.loss, lr=0.1, grad_norm=loop.grad_norm, epoch=0)


def with_micro_batches(monitor: TrainingMonitor, loop: Loop, step: int) -> None:
    with monitor.step() as current:
        current.micro_batch(loop.batch)
        current.micro_batch(loop.batch)
        current.log(loss=loop.loss)


def with_timed_batches(monitor: TrainingMonitor, loop: Loop, step: int) -> None:
    for batch in monitor.batches([loop.batch, loop.batch]):
        with monitor.step(batch) as current:
            current.log(loss=loop.loss)


every_way = pytest.mark.parametrize(
    "feed", [with_attention_mask, with_batch, with_context, with_micro_batches, with_timed_batches]
)


def run(monitor: TrainingMonitor, feed: Feed, steps: int) -> list[list[str]]:
    """What the monitor did on each step from the first ordinary one on and should not have done."""
    loop = Loop()
    monitor.set_model(loop.model)
    found = []
    for step in range(FIRST_ORDINARY):
        loop.train()
        feed(monitor, loop, step)
    for step in range(FIRST_ORDINARY, steps):
        loop.train()
        with forbidden_calls() as calls:
            feed(monitor, loop, step)
        found.append(calls)
    return found


@every_way
@pytest.mark.parametrize("mode", ["smart", "estimate", pytest.param("profiler", marks=pytest.mark.campaign)])
def test_an_ordinary_step_reads_writes_sends_and_waits_for_nothing(feed: Feed, mode: str, tmp_path: Path) -> None:
    log_every = LOG_EVERY * (2 if feed is with_timed_batches else 1)
    # Every reading of this clock is 1 ms after the last. By a real one, a pause of a busy machine between two steps is
    # reported as time outside steps, and that notice is written to the log.
    readings = count()
    with TrainingMonitor(tmp_path, mode=mode, log_every=log_every, clock=lambda: next(readings) / 1000) as monitor:
        found = run(monitor, feed, steps=LOG_EVERY - 1)
    assert found == [[]] * (LOG_EVERY - 1 - FIRST_ORDINARY)


class FarTensor(torch.Tensor):
    """Says it is on an accelerator. What is computed with it stays there; nothing can be read from it."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> "FarTensor":
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype, device="cuda")
        far.near = near.detach()
        return far

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "scalar" not in func.name(), f"{func.name()} reads from the accelerator"
        nearer = [argument.near if isinstance(argument, cls) else argument for argument in args]
        result = func(*nearer, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("feed", [with_attention_mask, with_batch, with_context])
def test_an_ordinary_step_leaves_on_an_accelerator_what_is_there(feed: Feed, tmp_path: Path) -> None:
    loop = Loop()
    monitor = TrainingMonitor(tmp_path, model=loop.model, log_every=LOG_EVERY, mode="estimate", strict=True)
    for step in range(FIRST_ORDINARY):
        loop.train()
        feed(monitor, loop, step)
    loop.batch = {name: FarTensor(tensor) for name, tensor in loop.batch.items()}
    loop.loss, loop.grad_norm = FarTensor(loop.loss), FarTensor(loop.grad_norm)
    for step in range(FIRST_ORDINARY, LOG_EVERY - 1):
        with forbidden_calls() as calls:
            feed(monitor, loop, step)
        assert calls == []
    with contextlib.suppress(Exception):  # a copy from an accelerator that does not exist
        monitor.close()


@every_way
def test_the_guard_sees_values_being_read_when_the_window_closes(feed: Feed, tmp_path: Path) -> None:
    """The same monitor, one step later: a guard that saw nothing here would be blind."""
    with TrainingMonitor(tmp_path, log_every=LOG_EVERY, mode="estimate") as monitor:
        found = run(monitor, feed, steps=LOG_EVERY)
    assert "call Tensor.item" in found[-1] or "call Tensor.tolist" in found[-1]


Slip = Callable[[torch.Tensor, Path], object]
NOWHERE = os.open(os.devnull, os.O_WRONLY)
SOCKETS = socket.socketpair()


@pytest.fixture(autouse=True, scope="module")
def _closed_afterwards() -> Iterator[None]:
    yield
    os.close(NOWHERE)
    for end in SOCKETS:
        end.close()


def write_to_descriptor(loss: torch.Tensor, folder: Path) -> None:
    os.write(NOWHERE, b"x")


def send_to_socket(loss: torch.Tensor, folder: Path) -> None:
    SOCKETS[0].send(b"x")


def connect(loss: torch.Tensor, folder: Path) -> None:
    with contextlib.suppress(OSError), socket.socket() as client:
        client.connect(("127.0.0.1", 9))


def synchronise(loss: torch.Tensor, folder: Path) -> None:
    # Without CUDA it can be called, not more: a build without CUDA asserts, one with CUDA finds no driver.
    with contextlib.suppress(AssertionError, RuntimeError):
        torch.cuda.synchronize()


def copy_to_host(loss: torch.Tensor, folder: Path) -> None:
    with contextlib.suppress(NotImplementedError):  # meta is the only other device of a CPU machine, and has no values
        torch.ones(3, device="meta").to("cpu")


def all_reduce(loss: torch.Tensor, folder: Path) -> None:
    dist.all_reduce(torch.ones(1))


SLIPS: dict[str, tuple[Slip, str]] = {
    "loss.item()": (lambda loss, folder: loss.item(), "call Tensor.item"),
    "float(loss)": (lambda loss, folder: float(loss.detach()), "op aten::_local_scalar_dense"),
    "if loss > 0": (lambda loss, folder: 1 if loss > 0 else 0, "op aten::_local_scalar_dense"),
    "tolist()": (lambda loss, folder: loss.detach().tolist(), "call Tensor.tolist"),
    "cpu()": (lambda loss, folder: loss.cpu(), "call Tensor.cpu"),
    "nonzero()": (lambda loss, folder: torch.ones(3).nonzero(), "op aten::nonzero"),
    "a boolean index": (lambda loss, folder: torch.ones(3)[torch.ones(3) > 0], "op aten::index"),
    "a copy to the host": (copy_to_host, "op aten::_to_copy"),
    "cuda.synchronize()": (synchronise, "call torch synchronize"),
    "all_reduce": (all_reduce, "call torch all_reduce"),
    "open()": (lambda loss, folder: (folder / "x").open("w").close(), "audit open"),
    "os.stat()": (lambda loss, folder: folder.stat(), "call module.stat"),
    "os.write()": (write_to_descriptor, "call module.write"),
    "a socket": (connect, "audit socket.connect"),
    "socket.send()": (send_to_socket, "call socket.send"),
    "print()": (lambda loss, folder: print("loss"), "call module.print"),  # noqa: T201  meant
    "logging": (lambda loss, folder: logging.getLogger("flopwatch").warning("loss"), "call"),
}


class Careless(TrainingMonitor):
    """Does one thing too many on every step."""

    def __init__(self, folder: Path, slip: Slip) -> None:
        super().__init__(folder, log_every=LOG_EVERY, mode="estimate")
        self._slip = slip

    def log_step(self, step: int, epoch: Any = None, loss: Any = None, *arguments: Any, **more: Any) -> None:
        super().log_step(step, epoch, loss, *arguments, **more)
        self._slip(loss, self.output_dir)


@pytest.mark.parametrize("name", SLIPS)
@pytest.mark.usefixtures("process_group")
def test_the_guard_fails_when_a_step_adds(name: str, tmp_path: Path) -> None:
    slip, expected = SLIPS[name]
    with Careless(tmp_path, slip) as monitor:
        found = run(monitor, with_attention_mask, steps=LOG_EVERY - 1)
    assert all(any(call.startswith(expected) for call in calls) for calls in found), found


def test_the_guard_counts_writes_that_python_does_not_announce() -> None:
    if not Path("/proc/thread-self/io").exists():
        pytest.skip("this kernel does not count")
    with forbidden_calls() as calls:
        torch._C._log_api_usage_once("flopwatch.test")  # a call into C that writes nothing
        os.writev(NOWHERE, [b"x"])
    assert calls[-1] == "kernel: 1 write calls"


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of one rank, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
