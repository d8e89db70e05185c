"""Record what the pictures of README and docs show: a training, one on four ranks, and a sweep, all on this machine.

    python benchmarks/pages/record.py

About eight minutes on two cores. Let nothing else run meanwhile: a busy machine shows in the pictures. `redraw.py`
draws them from the recording, which is part of the repository.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
SWEEP = "sweep --trainer standard,dpsgd,ghost,fast --batch-size 4,8 --seq-len 256,512 --steps 6 warmup_steps=1"
KEPT = (
    "runs/example/training_log.jsonl",
    "runs/ranks/training_log.jsonl",
    *(f"flopwatch-sweep/{name}" for name in ("sweep.json", "results.jsonl")),
)


def main() -> None:
    print(f"Load average before the recording: {os.getloadavg()[0]:.1f}; it should be near 0.")
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        # A verdict needs a minute of steps.
        _run(folder, str(ROOT / "examples" / "train.py"), "--steps", "240", "--model", "small")
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        _run(folder, *ranks, str(ROOT / "examples" / "train_ranks.py"), "--slow-rank", "2", OMP_NUM_THREADS="1")
        _run(folder, "-m", "flopwatch", *SWEEP.split())
        shutil.rmtree(RECORDED, ignore_errors=True)
        for name in KEPT:
            (RECORDED / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / name, RECORDED / name)
            print(RECORDED / name)


def _run(folder: str, *arguments: str, **variables: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, env={**os.environ, **variables})


if __name__ == "__main__":
    main()
