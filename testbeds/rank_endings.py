"""Trainers of which one process of several ends in its own way, run by workers as `rank_endings:OneRaises`."""

import ctypes
import os
import signal
import time

from flopwatch.sweep.trainers.builtin import StandardTrainer

CULPRIT = 1
AT_STEP = 2


class _OneOfMany(StandardTrainer):
    steps = 0

    def forward(self, batch):
        self.steps += 1
        if self.steps == AT_STEP and os.environ.get("RANK") == str(CULPRIT):
            self.go_wrong()
        return super().forward(batch)


class OneRaises(_OneOfMany):
    def go_wrong(self):
        raise ValueError("a mistake on one process")


class OneRaisesInBackward(StandardTrainer):
    """When the others have begun to wait for it."""

    def backward(self, loss):
        if os.environ["RANK"] == str(CULPRIT):
            time.sleep(0.5)
            raise ValueError("a mistake while the others wait")
        super().backward(loss)


class OneIsKilled(_OneOfMany):
    def go_wrong(self):
        os.kill(os.getpid(), signal.SIGKILL)


class OneSegfaults(_OneOfMany):
    def go_wrong(self):
        ctypes.string_at(0)


class OneIsOutOfMemory(_OneOfMany):
    def go_wrong(self):
        raise MemoryError("no memory for this process")


class OneHangs(_OneOfMany):
    def go_wrong(self):
        time.sleep(1000)


class OneLeaves(_OneOfMany):
    def go_wrong(self):
        os._exit(3)


class OneEatsMemory(_OneOfMany):
    def go_wrong(self):
        held = []
        while True:
            held.append(os.urandom(16 << 20))
            time.sleep(0.02)
