"""New Python processes in which torch is imported already: forks of a process that did nothing else.

    process = start_warm(code, "argument")            # as `python -c code argument`
    process = start_warm(Path("script.py"))           # as `python script.py`
    out, err = process.communicate(timeout=60)

Importing torch and the monitor takes 5 seconds of a core, a fork of this process 20 ms. Use it where a test needs a
process of its own (signals, exit status, ranks, state that stays), not where it is about the start of one.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

TORCH = ("torch", "torch._dynamo", "torch.distributed", "flopwatch.monitor.training_monitor")
"""`torch._dynamo` because the first optimizer imports it."""
TRANSFORMERS = (*TORCH, "transformers", "transformers.models.llama.modeling_llama")


class WarmProcess:
    """A child of the warm process, with the part of `subprocess.Popen` that tests use. Its output is read at once."""

    def __init__(self, connection: socket.socket, outputs: tuple[int, int]) -> None:
        self._connection = connection
        self._replies = connection.makefile()
        self.pid: int = json.loads(self._replies.readline())["pid"]
        self.returncode: int | None = None
        self._texts = ["", ""]
        self._readers = [threading.Thread(target=self._read, args=item, daemon=True) for item in enumerate(outputs)]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int, descriptor: int) -> None:
        with os.fdopen(descriptor, errors="replace") as file:
            self._texts[index] = file.read()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 300.0) -> int:
        """Its exit status; a process that is not done in time is killed."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = json.loads(self._replies.readline())["returncode"]
            except TimeoutError as error:
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired("warm python", timeout) from error
            finally:
                self._replies.close()
                self._connection.close()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """What it printed on both streams until its end."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout=30.0)
        return self._texts[0], self._texts[1]

    def end(self) -> None:
        """Kill it if it still runs, and wait for it."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended just now
                self.send_signal(signal.SIGKILL)
            self.wait()


def start_warm(
    code: str | Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    modules: tuple[str, ...] = TORCH,
) -> WarmProcess:
    """Run code, or the script at this path, in a process that has these modules."""
    environment = dict(os.environ) if env is None else env
    request = {
        "code": None if isinstance(code, Path) else code,
        "argv": [str(code) if isinstance(code, Path) else "-c", *arguments],
        "env": environment,
        "cwd": str(cwd or Path.cwd()),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address, server = _warm_server(modules)
    try:
        connection.connect(address)
    except ConnectionRefusedError as error:
        raise RuntimeError(f"the warm process has ended with status {server.poll()}") from error
    pipes = [os.pipe() for _ in range(2)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], [nothing, *(write for _, write in pipes)])
    connection.sendall(content)
    for descriptor in (nothing, *(write for _, write in pipes)):
        os.close(descriptor)
    return WarmProcess(connection, (pipes[0][0], pipes[1][0]))


@cache
def _warm_server(modules: tuple[str, ...]) -> tuple[str, "subprocess.Popen[bytes]"]:
    """Where the warm process with these modules listens, and itself; it is started now and ends with this process."""
    address = str(Path(tempfile.mkdtemp(prefix="flopwatch-warm-")) / "socket")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "support.warm_python", address, str(os.getpid()), *modules]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and (process.kill(), process.wait()))  # not in a fork of this process
    deadline = time.monotonic() + 300
    while not os.path.exists(address):
        assert time.monotonic() < deadline, "the warm process did not start"
        time.sleep(0.05)
    return address, process


# The warm process


def serve(address: str, parent: int, modules: list[str]) -> dict[str, object]:
    """Fork a child for every request until the parent is gone. Returns in each child, with its request."""
    for module in modules:
        import_module(module)
    gc.freeze()  # else every child would look through all that was imported, and copy it by that
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a process with threads must not be forked"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    connections: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        if select.select([listener], [], [], 0.05)[0]:
            connection, _ = listener.accept()
            header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            with connection.makefile("rb") as file:
                request = json.loads(file.read(int.from_bytes(header, "big")))
            pid = os.fork()
            if pid == 0:
                for other in (listener, connection, *connections.values()):
                    other.close()
                for target, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, target)
                    os.close(descriptor)
                return dict(request)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
            connections[pid] = connection
        _tell_ends(connections)
    os._exit(0)


def _tell_ends(connections: dict[int, socket.socket]) -> None:
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with suppress(OSError), connections.pop(pid) as connection:
            connection.sendall(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def become(request: dict[str, object]) -> tuple[object, dict[str, object]]:
    """Take over environment, folder, arguments and streams; the compiled code and the module it runs in."""
    argv, env, code = request["argv"], request["env"], request["code"]
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(request["cwd"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = argv
    folder = "" if code is not None else str(Path(argv[0]).parent)
    sys.path[:] = [folder, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    name = "<string>" if code is not None else argv[0]
    source = code if code is not None else Path(argv[0]).read_text()
    main = ModuleType("__main__")
    main.__file__ = name
    sys.modules["__main__"] = main
    return compile(str(source), name, "exec"), main.__dict__


if __name__ == "__main__":
    exec(*become(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
