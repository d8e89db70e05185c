"""Trainers that end a trial in every way a trial can end. Run by workers as `endings:Segfault` and so on."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

TRIAL_DIR = Path(os.environ.get("FLOPWATCH_TRIAL_DIR", "."))


class Counted:
    """Notes beside the trials that it was started, so that a test sees what ran twice.

    It updates the weights itself, because the first optimizer of torch.optim imports torch._dynamo for 2.5 s.
    """

    def __init__(self, model, settings):
        with (TRIAL_DIR.parent.parent / "starts.txt").open("a") as starts:
            starts.write(f"{TRIAL_DIR.name} {os.getpid()}\n")
        self.model = model

    def forward(self, batch):
        return self.model(**batch)["loss"]

    def backward(self, loss):
        loss.backward()

    def update(self):
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= 0.01 * weight.grad
                weight.grad = None


class PythonError(Counted):
    def forward(self, batch):
        raise ValueError("a mistake in the trainer")


class DeviceMemory(Counted):
    def forward(self, batch):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ..."
        )


class HostMemory(Counted):
    def forward(self, batch):
        held = []
        while True:
            held.append(bytearray(os.urandom(1) * (64 << 20)))


class Segfault(Counted):
    def forward(self, batch):
        ctypes.string_at(0)


class WaitsForItsKiller(Counted):
    def forward(self, batch):
        (TRIAL_DIR / "kill_me").write_text(str(os.getpid()))
        time.sleep(600)


class HardExit(Counted):
    def forward(self, batch):
        os._exit(3)


class SystemExitFour(Counted):
    def forward(self, batch):
        sys.exit(4)


class HangsWithTheGil(Counted):
    def forward(self, batch):
        ctypes.PyDLL(None).sleep(1000)


class HangsDeaf(Counted):
    def forward(self, batch):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(1000)


class Slow(Counted):
    """Longer in all than the no-progress limit, each step shorter."""

    def forward(self, batch):
        time.sleep(2.0)
        return super().forward(batch)


class LeavesAChild(Counted):
    def update(self):
        super().update()
        subprocess.Popen(["sleep", "1000"])


class LeavesASession(Counted):
    """A grandchild in a session of its own, whose parent is gone."""

    def update(self):
        super().update()
        subprocess.run(["/bin/sh", "-c", "setsid sleep 1001 & exit 0"], check=True)


class DiesWhileWriting(Counted):
    """Killed when the last file is written and not yet in its place."""

    def update(self):
        super().update()
        from flopwatch import files

        rename = files.os.replace

        def replace(source, target):
            if '"done": true' in Path(source).read_text():
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        files.os = type("os", (), {**vars(os), "replace": staticmethod(replace)})
