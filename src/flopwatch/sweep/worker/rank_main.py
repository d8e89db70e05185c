"""One of several processes of a trial: `python -m flopwatch.sweep.worker.rank_main TRIAL_DIR`, started by torchrun.

As `worker.py`, with files of its own, and with the word whether an exception may only follow another process's death.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flopwatch.records.reading import read_json
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import HEARTBEAT, STACKS, exception_file, of_rank, write_json
from flopwatch.sweep.claims import Heartbeat
from flopwatch.sweep.host.processes import die_with_parent
from flopwatch.sweep.worker.exception_outcome import describe_exception, message_of
from flopwatch.sweep.worker.main import leave

# RuntimeErrors by which gloo and NCCL say that another process is gone (torch 2.13); newer ones have classes.
_LOST_PEER = ("gloo", "NCCL", "ncclUnhandled", "ncclRemote", "Connection closed by peer", "Connection reset by peer")


def main(trial_dir: Path) -> int:
    die_with_parent(signal.SIGKILL)  # torchrun may be killed, and the supervisor may be on another host
    rank = int(os.environ["RANK"])
    stacks = (trial_dir / of_rank(STACKS, rank)).open("w")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    heartbeat = Heartbeat(trial_dir, of_rank(HEARTBEAT, rank))
    heartbeat.beat("import")
    job: dict[str, Any] = read_json(trial_dir / "spec.json")
    sys.path.insert(0, os.getcwd())  # a user's trainer lies in the working directory, as with `python -m`
    try:
        from flopwatch.sweep.worker.measure import measure_trial
        from flopwatch.sweep.worker.rank_group import rank_group

        spec = TrialSpec.from_json(job["spec"])
        measure_trial(trial_dir, spec, heartbeat, rank_group(spec))
    except BaseException as error:
        content = {**describe_exception(error), "rank": rank, "unix_time": time.time(), "lost_peer": lost_peer(error)}
        write_json(trial_dir / exception_file(rank), content)
        with contextlib.suppress(Exception):  # the trainer may have closed or replaced it
            sys.stderr.write(str(content["traceback"]))
        code = error.code if isinstance(error, SystemExit) else 1
        return code if isinstance(code, int) else 1
    return 0


def lost_peer(error: BaseException) -> bool:
    """Whether it says no more than that another process could not be reached."""
    if any(base.__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") for base in type(error).__mro__):
        return True
    return type(error) is RuntimeError and any(words in message_of(error) for words in _LOST_PEER)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
