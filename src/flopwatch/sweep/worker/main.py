"""The trial itself: `python -m flopwatch.sweep.worker.main TRIAL_DIR`, started by its supervisor.

Phases: import, build, warmup, measure, memory, flops, privacy, trace. What is known is written after each of them, so
that an end at any moment keeps what was measured.
"""

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

from flopwatch.records.reading import read_json
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import write_json
from flopwatch.sweep.claims import Heartbeat
from flopwatch.sweep.worker.exception_outcome import describe_exception, message_of


def main(trial_dir: Path) -> int:
    stacks = (trial_dir / "stacks.txt").open("w")
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    heartbeat = Heartbeat(trial_dir)
    heartbeat.beat("import")
    job: dict[str, Any] = read_json(trial_dir / "spec.json")
    sys.path.insert(0, os.getcwd())  # a user's trainer lies in the working directory, as with `python -m`
    try:
        from flopwatch.sweep.worker.measure import measure_trial

        measure_trial(trial_dir, TrialSpec.from_json(job["spec"]), heartbeat)
    except BaseException as error:
        content = describe_exception(error)
        write_json(trial_dir / "exception.json", content)
        print_exception(error, content)
        code = error.code if isinstance(error, SystemExit) else 1
        return code if isinstance(code, int) else 1
    return 0


def print_exception(error: BaseException, content: dict[str, Any]) -> None:
    """To the log; the trial's end must not depend on a hook or a stream that its trainer replaced or closed."""
    with contextlib.suppress(Exception):
        if len(content["message"]) < len(message_of(error)):
            sys.stderr.write(content["traceback"])  # a message of 50 MB would be all of the log
        else:
            sys.excepthook(type(error), error, error.__traceback__)


def leave(status: int) -> None:
    """End this process at once: threads that a trainer left running must not keep a finished trial alive."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the trainer may have closed or replaced it
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
