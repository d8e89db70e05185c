"""A training divided over two ranks in other ways than DDP, where this torch can do it on a CPU."""

from pathlib import Path

import pytest

from support.parallel_layouts import cases, trainable
from support.torchrun import torchrun
from testbeds.sharded import train
from testbeds.sharded.model import true_flops

pytestmark = [pytest.mark.slow, pytest.mark.portable]
LAYOUTS = ("fsdp1", "fsdp2", "tp", "cp", "pp_gpipe")
STEPS = 8


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("layouts"))
    results = torchrun(Path(train.__file__), folder, str(STEPS), *trainable(LAYOUTS), ranks=2)
    return {each["layout"]: each["rows"] for each in results if each["rank"] == 0}


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_a_layout_is_counted_as_one_process_is(layout, rows_of):
    rows = rows_of[layout]

    assert [row["exact"] for row in rows] == [True] * (STEPS // 4), rows[0]["notes"]
    assert [row["model_flops"] for row in rows] == [sum(map(true_flops, row["steps"])) for row in rows]
