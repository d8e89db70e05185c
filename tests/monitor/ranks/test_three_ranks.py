"""One log for all ranks: who writes it, what it holds, and how it goes on from a checkpoint."""

import json
from pathlib import Path

import pytest
import torch

import flopwatch
from support.torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "three_ranks.py"
RANKS, STEPS, WIDTH = 3, 23, 16
SAMPLES = sum(1 + rank + step % 4 for rank in range(RANKS) for step in range(STEPS))
FLOPS_PER_SAMPLE = 2 * 2 * WIDTH * WIDTH
"""Forward, and the gradient of the weights; the input needs none."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return torchrun(SCRIPT, str(tmp_path_factory.mktemp("ranks")), ranks=RANKS)


@pytest.mark.slow
def test_the_rank_that_was_chosen_has_the_numbers_of_all(results):
    first, second, last = (rank["last"] for rank in results)

    assert (first, second) == (None, None)
    assert last["total/samples"] == SAMPLES
    assert last["total/model_flops"] == SAMPLES * FLOPS_PER_SAMPLE
    assert last["ranks/reporting"] == RANKS


@pytest.mark.slow
def test_the_rank_that_all_others_wait_for_has_the_longest_own_step(results):
    values = results[2]["last"]

    assert values["ranks/longest_own_step_rank"] == 1
    assert values["ranks/longest_own_step_seconds"] > values["ranks/shortest_own_step_seconds"] + 0.025


@pytest.mark.slow
def test_there_is_one_log_for_each_run(results):
    assert results[0]["files"] == [f"{run}/training_log.jsonl" for run in ("all", "every", "last", "one")]


@pytest.mark.slow
def test_short_windows_steps_with_gaps_and_masks_of_floats_lose_no_rank(results):
    values = results[0]["every"]

    assert values["ranks/reporting"] == RANKS
    assert values["total/steps"] == STEPS
    assert values["total/samples"] == SAMPLES
    assert values["total/real_tokens"] == 7 * SAMPLES


@pytest.mark.slow
def test_a_state_taken_on_every_rank_continues_exactly_in_the_middle_of_a_window(results):
    run = results[0]["all"]

    assert run["values"]["total/steps"] == STEPS
    assert run["values"]["total/samples"] == SAMPLES
    assert run["values"]["total/model_flops"] == SAMPLES * FLOPS_PER_SAMPLE
    assert run["notices"] == [{}, {}]


@pytest.mark.slow
def test_a_state_taken_on_one_rank_says_that_it_is_behind_and_the_rest_is_an_estimate(results):
    first, second = results[0]["one"]["notices"]
    values = results[0]["one"]["values"]

    assert first["state_is_behind"] == 1
    assert second["totals_estimated"] == 1
    assert values["total/steps"] == STEPS
    assert values["total/samples"] == pytest.approx(SAMPLES, rel=0.02)


def test_without_a_process_group_the_rank_of_torchruns_environment_is_used_and_the_numbers_are_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    batch = torch.randn(4, 8)
    for rank in ("0", "2"):
        monkeypatch.setenv("RANK", rank)
        with flopwatch.TrainingMonitor(tmp_path / rank, model=torch.nn.Linear(8, 8)) as monitor:
            for _ in range(3):
                with monitor.step(batch):
                    pass
        if rank == "0":
            assert monitor.summary is not None
            assert monitor.summary.values["total/samples"] == 12
            assert "ranks_unknown" in monitor.summary.notices
        else:
            assert monitor.summary is None
            assert not (tmp_path / rank).exists()


def test_a_resume_inside_a_window_of_all_ranks_divides_it_as_the_logging_rank_does(tmp_path):
    from flopwatch.monitor.resume import find_resume_point

    def row(steps, tokens, ledger_tokens, all_tokens):
        return {
            "type": "row",
            "step": steps[-1],
            "unix_time": 1.0,
            "detailed": False,
            "values": {},
            "steps": {"step": steps, "seconds": [1.0] * len(steps), "tokens": tokens},
            "ledger": {"steps": steps[-1] + 1, "totals": {"tokens": ledger_tokens}, "seconds": {"train": 1.0}},
            "all_ranks": {"tokens": all_tokens},
        }

    log = tmp_path / "log.jsonl"
    rows = [row([0, 1], [10, 10], 60, 60), row([2, 3], [10, 30], 180, 120)]
    log.write_text("".join(json.dumps(line) + "\n" for line in rows))

    inside, after = find_resume_point(log, 3), find_resume_point(log, 4)

    assert inside is not None
    assert (inside.step, inside.ledger.totals["tokens"], inside.is_estimated) == (2, 60 + 30, True)
    assert after is not None
    assert (after.step, after.ledger.totals["tokens"], after.is_estimated) == (3, 180, False)
