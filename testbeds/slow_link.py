"""Two hosts on one machine, joined by a bad line: delay, jitter, loss, and a cut that can be switched.

    with slow_link(delay_ms=20, loss=0.01) as link:
        subprocess.Popen(link.command_in("a", ["python", "train.py"]), env={**os.environ, **link.environment})
        link.cut()
        link.mend()

Two network namespaces each have a TUN device; a child process carries packets between the two, later, or not at all.
Stands in for netem, which many kernels of build machines lack. The namespaces have no name and belong to that process:
they are gone when it is, however it or its parent ends. `delay_ms` is one way: a round trip takes twice as long.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

INTERFACE = "flopwatch0"
TOOLS = ("ip", "nsenter")
ADDRESSES = {"a": "10.79.0.1", "b": "10.79.0.2"}
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_LARGEST_PACKET_BYTES = 65536


class NoLinkError(RuntimeError):
    """This machine cannot have a slow link."""


@dataclass(frozen=True)
class Link:
    """What tests do with it."""

    process: "subprocess.Popen[str]"
    namespaces: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for processes on both hosts; host a is the one all meet at."""
        return {"MASTER_ADDR": ADDRESSES["a"], "GLOO_SOCKET_IFNAME": INTERFACE}

    def command_in(self, host: str, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self.namespaces[host]}", "--", *command]

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._say("cut")

    def mend(self) -> None:
        self._say("mend")

    def counts(self) -> dict[str, int]:
        """Packets carried and lost so far."""
        carried, lost = self._say("count").split()
        return {"carried": int(carried), "lost": int(lost)}

    def _say(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise NoLinkError("the process that carries the packets has ended")
        return answer


@cache
def why_not() -> str | None:
    """What is missing for a slow link; None when nothing is. Tries it: a container may forbid what is there."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if not os.path.exists("/dev/net/tun"):
        missing.append("/dev/net/tun")
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        return f"no slow link between two hosts here (missing: {', '.join(missing)})"
    try:
        with _opened_link([]):
            return None
    except NoLinkError as error:
        return f"no slow link between two hosts here: {error}"


def need_slow_link() -> None:
    """Skips where the kernel or the container forbids one; fails where only a package is missing that was promised."""
    import pytest

    reason = why_not()
    if reason is not None:
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS") == "1" and any(shutil.which(name) is None for name in TOOLS):
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def slow_link(delay_ms: float = 0.0, jitter_ms: float = 0.0, loss: float = 0.0, seed: int = 0) -> Iterator[Link]:
    """A line between the hosts "a" and "b".

    Args:
        delay_ms: Of each packet, one way.
        jitter_ms: The delay varies by so much up and down; order is kept.
        loss: Share of packets that never arrive.
        seed: Of the losses and the jitter.
    """
    reason = why_not()
    if reason is not None:
        raise NoLinkError(reason)
    with _opened_link(
        [f"--{name}={value}" for name, value in vars_of(delay_ms, jitter_ms, loss, seed).items()]
    ) as link:
        yield link


@contextmanager
def _opened_link(settings: list[str]) -> Iterator[Link]:
    command = [sys.executable, __file__, *settings]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready = process.stdout.readline().split()
        if not ready:
            raise NoLinkError("the devices could not be made: see the error above")
        yield Link(process, dict(zip(ADDRESSES, ready, strict=True)))
    finally:
        process.stdin.close()  # it ends by itself then
        process.wait(10)
        process.stdout.close()


def vars_of(delay_ms: float, jitter_ms: float, loss: float, seed: int) -> dict[str, float]:
    return {"delay-ms": delay_ms, "jitter-ms": jitter_ms, "loss": loss, "seed": seed}


def _make_host(address: str) -> tuple[int, str]:
    """A new network namespace with one device; this process is in it afterwards. Returns the device and its path."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace could not be made")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)  # held open: the namespace lives as long
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TUN_NO_PI))
    for settings in (f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"):
        subprocess.run(["ip", *settings.split()], check=True)
    return device, f"/proc/{os.getpid()}/fd/{namespace}"


class _Carrier:
    """Takes packets from one device and gives them to the other when it is time."""

    def __init__(self, devices: Sequence[int], delay_ms: float, jitter_ms: float, loss: float, seed: int) -> None:
        self._other = {devices[0]: devices[1], devices[1]: devices[0]}
        self._delay, self._jitter, self._loss = delay_ms / 1e3, jitter_ms / 1e3, loss
        self._random = random.Random(seed)
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._latest = dict.fromkeys(devices, 0.0)
        self.is_cut = False
        self.carried = self.lost = 0

    def run(self, control: int) -> None:
        while True:
            due = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else None
            readable, _, _ = select.select([*self._other, control], [], [], None if due is None else max(0.0, due))
            if control in readable and not self._obey(os.read(control, 4096).decode()):
                return
            for device in readable:
                if device != control:
                    self._take_from(device)
            self._deliver()

    def _take_from(self, device: int) -> None:
        for _ in range(64):  # then the others have their turn
            try:
                packet = os.read(device, _LARGEST_PACKET_BYTES)
            except BlockingIOError:
                return
            if self.is_cut or self._random.random() < self._loss:
                self.lost += 1
                continue
            arrives = time.monotonic() + self._delay + self._random.uniform(-1, 1) * self._jitter
            # Never before the one sent earlier: TCP would take a swap for a loss.
            self._latest[device] = arrives = max(arrives, self._latest[device])
            self.carried += 1
            heapq.heappush(self._on_the_way, (arrives, self.carried, self._other[device], packet))

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(self._on_the_way)
            try:
                os.write(device, packet)
            except OSError:  # its queue is full, as a real one can be
                self.lost += 1

    def _obey(self, words: str) -> bool:
        for word in words.split():
            if word == "count":
                answer = f"{self.carried} {self.lost}"
            else:
                self.is_cut = word == "cut"
                if self.is_cut:
                    self.lost += len(self._on_the_way)
                    self._on_the_way.clear()
                answer = word
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()
        return bool(words)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in vars_of(0.0, 0.0, 0.0, 0).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = vars(parser.parse_args())
    devices, paths = zip(*(_make_host(address) for address in ADDRESSES.values()), strict=True)
    sys.stdout.write(" ".join(paths) + "\n")
    sys.stdout.flush()
    _Carrier(devices, **options).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
