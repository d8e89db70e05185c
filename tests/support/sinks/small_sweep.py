"""A sweep of three shell commands, one of which fails, as a user starts it."""

import subprocess
import sys

from support.sinks.fresh_python import fresh_environment

COMMAND = 'echo "{\\"samples_per_s\\": {batch_size}}" > $FLOPWATCH_TRIAL_DIR/metrics.json; exit $(({batch_size} / 3))'


def sweep(folder, *words, **environment):
    command = [sys.executable, "-m", "flopwatch", "sweep", "--command", COMMAND, "batch_size=1,2,3", "seq_len=8"]
    environment = fresh_environment(FLOPWATCH_SLOT_DIR=str(folder.parent / "slots"), **environment)
    return subprocess.run(
        [*command, "-o", str(folder), *words], capture_output=True, text=True, timeout=300, env=environment
    )


def wandb_files(folder):
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
