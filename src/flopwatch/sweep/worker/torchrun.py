"""The worker of a trial of several processes: `python -m flopwatch.sweep.worker.torchrun TRIAL_DIR`.

It runs torchrun, which starts `flopwatch.sweep.worker.main` once for each process, and writes how these ended.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from flopwatch.decode import read_record
from flopwatch.files import load_json, write_json
from flopwatch.records.trial import TrialJob
from flopwatch.records.trial_files import RANKS, SPEC
from flopwatch.sweep.host.processes import usable_cores
from flopwatch.sweep.progress import when_there_is_space
from flopwatch.sweep.worker.main import leave


def main(trial_dir: Path) -> int:
    job = read_record(TrialJob, load_json(trial_dir / SPEC))
    processes = job.spec.processes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // processes)))
    with tempfile.TemporaryDirectory(prefix="flopwatch-torchrun-") as folder:
        words = [
            *("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}", "--max-restarts=0"),
            *(f"--log-dir={folder}", "-m", "flopwatch.sweep.worker.main", str(trial_dir), "--rank"),
        ]
        ended: dict[str, Any] = {}
        try:
            run.run(run.parse_args(words))
        except ChildFailedError as error:
            ended = {"statuses": {rank: failure.exitcode for rank, failure in error.failures.items()}}
        except Exception as error:  # noqa: BLE001 - torchrun has many, as for a failed rendezvous
            ended = {"error": f"{type(error).__name__}: {error}"[:2000]}
    when_there_is_space(lambda: write_json(trial_dir / RANKS, {"statuses": {}, "error": "", **ended}))
    return int(bool(ended))


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
