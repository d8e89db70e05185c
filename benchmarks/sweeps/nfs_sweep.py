"""A sweep on a stand-in for NFS with a minute of attribute caching and no flock; its runner is killed halfway.

    python benchmarks/sweeps/nfs_sweep.py --seconds 60 --trials 6

Every supervisor counts as a host of its own, and the second runner is on another host than the first. Nothing that had
finished may be lost, although its result was not in sight, and nothing may run twice at once.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from flopwatch.records.sweep_results import read_results
from testbeds.nfs import on_nfs

_TRIAL = "echo {batch_size} >> $FOLDER/starts; sleep 1; echo {batch_size} >> $FOLDER/ends"


def start(folder: Path, trials: int, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    sizes = ",".join(map(str, range(1, trials + 1)))
    sweep = [sys.executable, "-m", "flopwatch", "sweep", "--output", "s", "--jobs", "2"]
    own = {"FOLDER": str(folder), "FLOPWATCH_SLOT_DIR": str(folder)}
    return subprocess.Popen(
        [*sweep, "--command", _TRIAL, f"--batch-size={sizes}", "--seq-len=1"],
        cwd=folder / "nfs",
        env={**environment, **own},
    )


def words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="Of attribute caching.")
    parser.add_argument("--trials", type=int, default=6)
    asked = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="flopwatch-nfs-")), time.monotonic()
    (folder / "nfs").mkdir()
    environment = on_nfs(folder / "nfs", asked.seconds)
    runner = start(folder, asked.trials, environment)
    while len(words(folder / "ends")) < asked.trials // 3:
        time.sleep(0.1)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    finished = words(folder / "ends")
    status = start(folder, asked.trials, {**environment, "NFS_STANDIN_HOST": "login2"}).wait()
    ends, results = Counter(words(folder / "ends")), read_results(folder / "nfs" / "s")
    print(
        f"exit status {status}, {time.monotonic() - began:.0f} s, {asked.trials} trials, {len(finished)} had finished"
    )
    print("outcomes", dict(Counter(result.outcome for result in results.values())), "starts", words(folder / "starts"))
    again = [size for size, count in ends.items() if count > 1]
    print("finished and run again:", again)
    sys.exit(status or bool(again))


if __name__ == "__main__":
    main()
