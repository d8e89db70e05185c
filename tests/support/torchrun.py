"""Start a script on several gloo ranks and collect what each of them says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def torchrun(script: Path, *arguments: str, ranks: int, seconds: float = 240) -> list[dict[str, Any]]:
    """The results of all ranks, in their order: each prints one line of JSON behind the word RESULT."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Ranks share a pipe, so two results may stand in one line.
    parts = done.stdout.split("RESULT ")[1:]
    results = [json.JSONDecoder().raw_decode(part)[0] for part in parts]
    return sorted(results, key=lambda result: result["rank"])
