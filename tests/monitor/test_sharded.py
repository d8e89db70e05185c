"""One training in every way to divide it over ranks: exact from the first row on, and equal to one process."""

from functools import cache
from pathlib import Path

import pytest

from support.parallel_layouts import cases, trainable
from support.torchrun import torchrun
from testbeds.sharded import train
from testbeds.sharded.model import batch_of, true_flops

pytestmark = pytest.mark.slow
STEPS = 16
ON_TWO = [
    "ddp",
    "fsdp1",
    "fsdp2",
    "tp",
    "cp",
    "pp_gpipe",
    "pp_1f1b",
    "pp_interleaved",
    "ddp_compiled",
    "fsdp2_compiled",
]
ON_FOUR = ["ddp", "fsdp2", "hsdp", "tp", "tp_fsdp2", "cp", "pp_gpipe", "pp_1f1b", "ddp_compiled", "fsdp2_compiled"]
CASES = [*cases(ON_TWO, 2), *cases(ON_FOUR, 4)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """One launch trains all layouts that are asked for on so many ranks.

    Those that compile come last, because a process never forgets.
    """
    tests = [
        item for item in request.session.items if item.path == request.path and not item.get_closest_marker("skip")
    ]
    wanted = {(item.callspec.params["ranks"], item.callspec.params["layout"]) for item in tests}

    @cache
    def launch(ranks, is_watched):
        folder = str(tmp_path_factory.mktemp("sharded")) if is_watched else "bare"
        names = [name for name in trainable({2: ON_TWO, 4: ON_FOUR}[ranks]) if (ranks, name) in wanted]
        found = torchrun(Path(train.__file__), folder, str(STEPS), *names, ranks=ranks, seconds=500)
        return {(each["layout"], each["rank"]): each for each in found}

    return launch


@pytest.mark.requirement("R13")
@pytest.mark.parametrize(("ranks", "layout"), CASES)
def test_every_row_is_exact_and_that_of_the_global_batch(ranks, layout, results):
    rows = results(ranks, True)[layout, 0]["rows"]

    assert [row["exact"] for row in rows] == [True] * (STEPS // 4), rows[0]["notes"]
    assert [row["model_flops"] for row in rows] == [sum(map(true_flops, row["steps"])) for row in rows]
    assert [row["tokens"] for row in rows] == [sum(batch_of(step).numel() for step in row["steps"]) for row in rows]


@pytest.mark.parametrize(("ranks", "layout"), CASES)
def test_the_parameters_of_every_rank_are_those_without_a_monitor(ranks, layout, results):
    watched, bare = results(ranks, True), results(ranks, False)

    for rank in range(ranks):
        assert watched[layout, rank]["checksum"] == bare[layout, rank]["checksum"]
