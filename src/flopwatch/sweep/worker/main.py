"""The worker process of a trial: `python -m flopwatch.sweep.worker.main TRIAL_DIR [--rank]`.

A supervisor starts the worker of a trial with one process. For a trial with several, torchrun starts one worker with
`--rank` for each process, and each worker writes its own files (`of_rank`).

Phases: import, build, warmup, measure, memory, flops, privacy, trace. Results are written after each phase, so that a
crash does not lose the results of earlier phases.
"""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flopwatch.decode import read_record
from flopwatch.files import read_json, write_json
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import EXCEPTION, HEARTBEAT, SPEC, STACKS, exception_file, of_rank
from flopwatch.sweep.progress import Heartbeat, when_there_is_space
from flopwatch.sweep.worker.exception_outcome import describe_exception, message_of, result_or_error

# Parts of the messages of RuntimeErrors by which gloo and NCCL report a lost process (torch 2.13).
_LOST_PEER = ("gloo", "NCCL", "ncclUnhandled", "ncclRemote", "Connection closed by peer", "Connection reset by peer")


def main(trial_dir: Path, rank: int | None = None) -> int:
    """Measure the trial and return the exit status; `rank` is None for the trial's only process."""
    stacks = when_there_is_space(lambda: (trial_dir / of_rank(STACKS, rank or 0)).open("w"))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    heartbeat = Heartbeat(trial_dir, of_rank(HEARTBEAT, rank or 0))
    heartbeat.beat("import")
    job: dict[str, Any] = read_json(trial_dir / SPEC)
    sys.path.insert(0, os.getcwd())  # as `python -m` does, because a user's trainer may be there
    try:
        # Imported here, so that a failing import of torch is recorded as the trial's exception.
        from flopwatch.sweep.worker.measure import measure_trial

        measure_trial(trial_dir, read_record(TrialSpec, job["spec"]), heartbeat)
    except BaseException as error:  # noqa: BLE001 - whatever the trainer raises is the result of the trial
        content = describe_exception(error)
        file = trial_dir / (EXCEPTION if rank is None else exception_file(rank))
        facts = {} if rank is None else {"rank": rank, "unix_time": time.time(), "lost_peer": lost_peer(error)}
        heartbeat.written(lambda: write_json(file, content | facts))
        result_or_error(lambda: sys.stderr.write(content["traceback"]))
        code = error.code if isinstance(error, SystemExit) else 1
        return code if isinstance(code, int) else 1
    return 0


def lost_peer(error: BaseException) -> bool:
    """Whether the exception only reports that another process could not be reached, so that the cause is elsewhere."""
    if any(base.__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") for base in type(error).__mro__):
        return True
    return type(error) is RuntimeError and any(words in message_of(error) for words in _LOST_PEER)


def leave(status: int) -> None:
    """End this process at once, because threads of the trainer would otherwise keep a finished trial alive."""
    result_or_error(lambda: sys.stdout.flush())  # the trainer may have closed or replaced the stream
    result_or_error(lambda: sys.stderr.flush())
    os._exit(status)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(os.environ["RANK"]) if "--rank" in sys.argv[2:] else None))
