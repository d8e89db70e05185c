"""The same global batches in every parallel layout: the same FLOPs and tokens, whatever is sharded over whom."""

import json
from functools import cache
from pathlib import Path

import pytest

from support.parallel_layouts import cases, trainable
from support.parallel_transformer import global_batch, padded_flops, true_flops
from support.torchrun import outputs_of_ranks
from support.warm_python import start_warm

SCRIPT = Path(__file__).parent / "scripts" / "layouts.py"
STEPS = 8
LAYOUTS = ("single", "ddp", "fsdp2", "tp_dp", "pp_dp", "cp_dp")
SHARE_OF_PARAMETERS = {"fsdp2": 1 / 4, "tp_dp": 1 / 4, "pp_dp": 1 / 2}
pytestmark = pytest.mark.slow
"""In one worker: they share the launches."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One launch trains all layouts with both accumulations: starting four ranks takes longer than their training."""

    @cache
    def launch(layouts, steps):
        arguments = [str(tmp_path_factory.mktemp("layouts")), ",".join(layouts), str(steps), "1", "4"]
        if layouts == ("single",):
            process = start_warm(SCRIPT, *arguments)
            outputs = [process.communicate()[0]]
            assert process.returncode == 0
        else:
            outputs = outputs_of_ranks(SCRIPT, *arguments, ranks=4)
        lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
        results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
        return {(result["layout"], result["accumulation"]): result for result in results}

    def run(layout, accumulation, *, steps=STEPS, layouts=None):
        together = ("single",) if layout == "single" else trainable(LAYOUTS[1:])
        return launch(layouts or together, steps)[layout, accumulation]

    return run


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_flops_and_tokens_are_those_of_the_global_batch(layout, accumulation, trained):
    values = trained(layout, accumulation)["monitor"]

    # Halves of a sequence have one position more where it cannot be halved.
    with_padding = {"pp_dp": padded_flops(STEPS), "cp_dp": padded_flops(STEPS, multiple=2)}
    assert_whole(values, STEPS, with_padding.get(layout))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_run_that_ends_in_its_first_windows_is_whole_too(accumulation, trained):
    """It ends before the logging rank has told the others where windows end and what batches cost."""
    values = trained("ddp", accumulation, steps=3, layouts=("ddp",))["monitor"]

    assert_whole(values, 3)


def assert_whole(values, steps, with_padding=None):
    """Where a rank runs only some rows or positions of a batch at a time, it is told that FLOPs include padding."""
    batches = [global_batch(step) for step in range(steps)]
    assert values["perf/exact"] == (with_padding is None)
    if with_padding is None:
        assert values["total/model_flops"] == true_flops(steps)
    else:  # some micro-batches have one row, which is not divided
        assert true_flops(steps) < values["total/model_flops"] <= with_padding
        assert values["total/model_flops"] == pytest.approx(with_padding, rel=0.01)
    assert values["total/tokens"] == sum(batch["input_ids"].numel() for batch in batches)
    assert values["total/real_tokens"] == sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert values["total/trainable_tokens"] == sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert values["total/samples"] == sum(len(batch["input_ids"]) for batch in batches)
    assert values["total/steps"] == steps


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_the_layouts_train_what_one_process_trains(layout, accumulation, trained):
    """So the layouts are what they say: every rank takes part, and their work together is that of the whole batch."""
    result = trained(layout, accumulation)

    assert result["loss_error"] < 2e-6
    assert result["parameter_error"] < 1e-6 < 1e-3 < result["parameter_change"]
    assert result["parameters_seen"], "every parameter of the model, be it on one stage only"
    share = result["held_parameters"] / result["whole_parameters"]
    assert share == pytest.approx(SHARE_OF_PARAMETERS.get(layout, 1.0), rel=0.1)
