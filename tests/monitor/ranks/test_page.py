"""The snippet for several ranks (```py in docs/ranks.md) prints what it must on so many ranks."""

import re
from pathlib import Path

import pytest

from support.torchrun import outputs_of_ranks

ROOT = Path(__file__).parents[3]
EXPECTED = {
    # Two layers of 64 x 256 weights: 2 FLOPs each, forward and twice backward, without the gradient of the input.
    "docs/ranks.md": (4, f"{60 * 38} {60 * 38 * 64 * 256 * 2 * (2 + 3)}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", EXPECTED)
def test_the_snippet_runs_on_several_ranks_and_counts_all_of_them(page, tmp_path, monkeypatch):
    ranks, expected = EXPECTED[page]
    found = re.findall(r"^```py\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    found = [snippet for snippet in found if "torch.distributed" in snippet]
    assert len(found) == 1
    # torch 2.13 can hang in the teardown of gloo after a backward pass, also without us.
    ending = "\nimport os, sys\ndist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "train.py").write_text(found[0] + ending)
    monkeypatch.chdir(tmp_path)

    outputs = outputs_of_ranks(tmp_path / "train.py", ranks=ranks)

    assert "".join(outputs).strip() == expected
