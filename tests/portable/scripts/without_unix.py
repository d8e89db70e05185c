"""A count, a monitored training and a sweep in a Python as it is on macOS or Windows.

    python without_unix.py win32 FOLDER         # writes FOLDER/result.json

What only Unix or only Linux has is taken away before anything of flopwatch is imported. torch and the frameworks are
imported first: they are built for this machine. Run by tests/portable/test_without_unix.py.
"""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

BEFORE = (
    "torch", "torch._dynamo", "torch.distributed", "torch.utils.flop_counter", "torch.utils.data", "torch.profiler",
    "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor", "rich.console", "click", "pydantic.main",
    "yaml", "transformers.trainer", "lightning.pytorch", "accelerate", "psutil", "zoneinfo",
)  # fmt: skip
"""They have other wheels for the other systems."""

UNIX_MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "posix", "readline")
LINUX_OS = (
    "sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "posix_fadvise", "sched_yield",
    "eventfd", "splice", "copy_file_range",
)  # fmt: skip
UNIX_OS = (
    "fork", "forkpty", "register_at_fork", "killpg", "setsid", "getpgid", "setpgid", "getsid", "getuid", "geteuid",
    "getgid", "getegid", "getgroups", "uname", "getloadavg", "sysconf", "statvfs", "mkfifo", "nice", "waitid",
    "WNOHANG", "wait3", "wait4", "openpty", "chown", "chroot", "pread", "pwrite", "O_NONBLOCK", "O_CLOEXEC",
    "O_NOFOLLOW", "O_DIRECTORY", "O_SYNC", "fchmod", "fchown", "posix_spawn", "set_blocking", "confstr",
)  # fmt: skip
UNIX_SIGNALS = (
    "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGALRM", "SIGBUS",
    "SIGPIPE", "SIGRTMIN", "SIGRTMAX", "SIGXCPU", "pthread_kill", "pthread_sigmask", "sigwait", "sigpending",
    "setitimer", "alarm", "siginterrupt",
)  # fmt: skip


class _Hidden(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in UNIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def hide(platform: str) -> None:
    """Take away what `win32` or `darwin` does not have."""
    names = LINUX_OS if platform == "darwin" else LINUX_OS + UNIX_OS
    if platform == "win32":
        for module in UNIX_MODULES:
            sys.modules.pop(module, None)
        sys.meta_path.insert(0, _Hidden())
        _delete(signal, UNIX_SIGNALS)
    _delete(os, names)
    _hide_proc()
    sys.platform = platform


def _delete(module: ModuleType, names: Sequence[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _hide_proc() -> None:
    """Nothing below /proc and /sys can be opened, listed or found."""

    def is_hidden(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys"))

    def guarded(real):  # type: ignore[no-untyped-def]
        def call(path=".", *arguments, **more):  # type: ignore[no-untyped-def]
            if is_hidden(path):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            return real(path, *arguments, **more)

        return call

    for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
        setattr(os, name, guarded(getattr(os, name)))
    builtins.open = io.open = guarded(io.open)


# What is tried then


def import_all() -> tuple[int, dict[str, str]]:
    """How many modules of flopwatch can be imported, and the errors of those that cannot."""
    import flopwatch
    from flopwatch.errors import MissingDependencyError

    imported, failed = 0, {}
    for module in pkgutil.walk_packages(flopwatch.__path__, "flopwatch."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
            imported += 1
        except MissingDependencyError:
            pass  # an extra that is not installed here
        except Exception as error:
            failed[module.name] = f"{type(error).__name__}: {error}"
    return imported, failed


def monitor_a_training(folder: Path) -> dict[str, Any]:
    import torch

    import flopwatch

    model = torch.nn.Linear(16, 16, bias=False)
    count = flopwatch.count_flops(model, torch.randn(4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flopwatch.TrainingMonitor(folder, model=model, log_every=2, strict=True) as monitor:
        for number in range(6):
            batch = torch.randn(4 + number % 2, 16)
            with monitor.step(batch) as step:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)
    assert monitor.summary is not None
    return {
        "count": {"model_flops": count.model_flops, "method": count.method},
        "failed_parts": dict(monitor.summary.failed_parts),
        "model_flops": monitor.summary.values["total/model_flops"],
    }


def run_commands(run: Path) -> list[int]:
    """The exit statuses of three commands."""
    from flopwatch.cli import main

    commands = [["explain", str(run), "--step", "2"], ["flops", "--model", "tiny"], ["peak", "--name", "NVIDIA L40S"]]
    statuses = []
    for arguments in commands:
        try:
            main(arguments)
        except SystemExit as end:
            statuses.append(int(end.code or 0))
    return statuses


def sweep(folder: Path) -> str:
    """The outcome of a trial, or what the sweep says instead."""
    import flopwatch

    os.environ["FLOPWATCH_SLOT_DIR"] = str(folder / "slots")
    matrix = {"trainer": [{"label": "fine", "command": "true"}], "batch_size": [1], "seq_len": [8]}
    try:
        results = flopwatch.sweep.run(matrix, folder / "sweep")
    except ValueError as error:
        return str(error)
    return next(iter(results.values())).outcome


def main(platform: str, folder: Path) -> None:
    for name in BEFORE:
        with suppress(ImportError):
            importlib.import_module(name)
    hide(platform)
    result = monitor_a_training(folder / "run")
    result["statuses"] = run_commands(folder / "run")
    result["imported"], result["not_imported"] = import_all()
    result["sweep"] = sweep(folder)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
