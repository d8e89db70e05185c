"""docs/run.md says of each script of testbeds/unchanged what the tests of these scripts say."""

import pytest

from flopwatch.text import one_line
from support.public_surface import ROOT
from testbeds.unchanged.scripts import SCRIPTS

ROWS = [line for line in (ROOT / "docs" / "run.md").read_text("utf-8").splitlines() if "testbeds/unchanged/" in line]


def cells_of(script):
    (row,) = [row for row in ROWS if f"/testbeds/unchanged/{script.path})" in row]
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def test_there_is_one_row_for_each_script():
    assert len([row for row in ROWS if row.startswith("| ")]) == len(SCRIPTS) == 20


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_row_says_what_is_measured_and_what_is_not(script):
    training, output, flops, amounts, not_measured, exact, said = cells_of(script)
    assert one_line(script.what) in training
    assert output == "equal"
    if not script.edits:
        assert (flops, amounts, not_measured) == ("", "", "")
        return
    assert flops == ("absent" if "model_flops" in script.lacks else "equal")
    assert amounts.split(",")[0] == ("absent" if "samples" in script.lacks else "equal")
    assert not_measured == (", ".join(map(str, script.not_measured)) or "none")
    assert said or (exact.startswith("yes") and script.notice is None), "what is not seen has a reason"
