"""The snippets for several ranks (```py on README and docs/ranks.md) run under torchrun and print what they must."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXPECTED = {
    "README.md": (2, f"{30 * (8 + 9)} samples on all ranks"),
    # Two layers of 64 x 256 weights: 2 FLOPs each, forward and twice backward, without the gradient of the input.
    "docs/ranks.md": (4, f"{60 * 38} {60 * 38 * 64 * 256 * 2 * (2 + 3)}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", EXPECTED)
def test_the_snippet_runs_on_several_ranks_and_counts_all_of_them(page, tmp_path):
    ranks, expected = EXPECTED[page]
    found = re.findall(r"^```py\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    found = [snippet for snippet in found if "torch.distributed" in snippet]
    assert len(found) == 1
    # torch 2.13 can hang in the teardown of gloo after a backward pass, also without us.
    ending = "\nimport os, sys\ndist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "train.py").write_text(found[0] + ending)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
