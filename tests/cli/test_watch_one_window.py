"""What stands side by side on the screen of `flopwatch watch` is of the same window, the same ranks, the same time."""

import re
from dataclasses import replace

import pytest

from cli.test_watch import text_of, watched
from flopwatch.records.run import Row, RunStart
from support.make_run_log import Accounts, Story, session


def a_row(step, *, mfu, rate, unix_time=None, **more):
    values = {"perf/mfu_percent": mfu, "perf/hfu_percent": mfu, "perf/step_time": 0.1}
    if rate is not None:
        values |= {f"perf/{kind}_flops_per_second_per_device": rate for kind in ("model", "hardware")}
    return Row(step, 10.0 + step if unix_time is None else unix_time, values, **more)


def test_flops_per_second_and_mfu_are_of_the_same_window():
    """The peak is 320 GFLOP/s: 104.2 of it are 32.6 %, and the newest window had 30.5 %."""
    detailed = a_row(10, mfu=32.6, rate=104.2e9, detailed=True)
    newest_without = a_row(20, mfu=30.5, rate=None)
    text = text_of(watched([RunStart("s", 0.0, "out"), detailed, newest_without]))
    assert "30.5 %" in text
    assert "104.2 GFLOP/s" not in text
    newest = a_row(20, mfu=30.5, rate=97.6e9)
    assert "97.6 GFLOP/s" in text_of(watched([RunStart("s", 0.0, "out"), detailed, newest]))


def test_every_row_of_a_run_has_what_the_screen_shows_together():
    from flopwatch.records.metrics import METRICS

    for key in (
        "perf/model_flops_per_second_per_device",
        "perf/hardware_flops_per_second_per_device",
        "perf/padding_percent",
        "perf/recompute_percent",
        "perf/samples_per_second",
        "ranks/longest_input_wait_rank",
        "training/grad_norm",
    ):
        assert METRICS[key].basic, key


def test_the_percentiles_are_of_the_steps_up_to_the_newest_window():
    slow = [0.5] * 10
    rows = [a_row(9, mfu=1.0, rate=1e9, detailed=True, steps={"step": list(range(10)), "seconds": [0.1] * 10})]
    rows[0] = replace(rows[0], values={**rows[0].values, "perf/step_time_p50": 0.1, "perf/step_time_p99": 0.1})
    rows.append(a_row(19, mfu=1.0, rate=1e9, steps={"step": list(range(10, 20)), "seconds": slow}))
    rows.append(a_row(29, mfu=1.0, rate=1e9, steps={"step": list(range(20, 30)), "seconds": slow}))
    text = text_of(watched([RunStart("s", 0.0, "out"), *rows]))
    assert "p50 500" in text
    assert "p99 500" in text


def test_what_the_flops_are_for_is_of_all_ranks_where_there_are_several():
    """The logging rank pads nothing, all ranks together a fifth."""
    row = a_row(
        10,
        mfu=40.0,
        rate=1e9,
        steps={"step": [10], "model_flops": [100], "hardware_flops": [100]},
        all_ranks={"model_flops": 320, "hardware_flops": 400, "recompute_flops": 0},
    )
    row = replace(row, values={**row.values, "perf/recompute_percent": 0.0, "perf/padding_percent": 12.0})
    text = text_of(watched([RunStart("s", 0.0, "out", world_size=4), row]))
    assert "useful 80.0 %" in text
    assert "padding 20.0 %" in text


def test_padding_that_is_not_there_is_not_shown_as_a_little():
    """100 - useful - recomputed is 1e-14 in floating point."""
    model, hardware = 6126933103096309, 6297988027461049
    row = a_row(10, mfu=40.0, rate=1e9, steps={"step": [10], "model_flops": [model], "hardware_flops": [hardware]})
    again = 100 * (hardware - model) / hardware
    row = replace(row, values={**row.values, "perf/recompute_percent": again, "perf/padding_percent": 0.0})
    text = text_of(watched([RunStart("s", 0.0, "out"), row]))
    assert "padding" not in text
    assert "< 0.1 %" not in text


def test_pairs_across_documents_are_not_called_padding():
    row = a_row(10, mfu=40.0, rate=1e9, steps={"step": [10], "model_flops": [80], "hardware_flops": [100]})
    row = replace(row, values={**row.values, "perf/recompute_percent": 5.0, "perf/padding_percent": 0.0})
    text = text_of(watched([RunStart("s", 0.0, "out"), row]), width=120, height=40)
    assert "pairs across documents 15.0 %" in text
    assert "padding" not in text


def test_all_shares_of_time_are_of_the_wall_time():
    seconds = {"wall": 200.0, "train": 60.0, "count": 43.0, "eval": 7.0, "start_up": 40.0, "restart": 30.0}
    row = a_row(10, mfu=40.0, rate=1e9, ledger={"steps": 10, "totals": {}, "seconds": seconds})
    text = text_of(watched([RunStart("s", 0.0, "out"), row]), width=160, height=40)
    assert set(re.findall(r"counting FLOPs ([\d.]+ %)", text)) == {"21.5 %"}
    assert len(re.findall("counting FLOPs", text)) == 2, "in the bar and in the goodput, under the same name"
    assert re.search(r"start-up 20\.0 %", text)
    assert set(re.findall(r"restarts ([\d.]+ %)", text)) == {"15.0 %"}
    assert "other time 10.0 %" in text
    shares = [float(share) for share in re.findall(r"■ [A-Za-z -]+ ([\d.]+) %", text.partition("goodput")[0])]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert "3 min" in text, "of 200 s"


def test_steps_counted_from_0_read_the_same_above_and_below_the_curve():
    rows = [Row(step, 10.0 + step, {"training/loss": 2.0}, ledger={"steps": step + 1}) for step in (29, 59)]
    text = text_of(watched([RunStart("s", 0.0, "out", total_steps=60), *rows]))
    assert "60 of 60 steps" in text
    assert "step 60" not in text
    assert re.search(r"└29 .*59", text)


def test_a_run_that_ended_without_a_loss_in_its_last_window_keeps_the_loss_it_had():
    records = list(session(Story(), 1, 40, Accounts()))
    last = replace(records[-1], step=43, values={"perf/step_time": 0.3})
    text = text_of(watched([*records, last]))
    assert f"{records[-1].values['training/loss']:.3f}" in text
    assert "at step 40" in text


def test_an_mfu_that_is_small_is_not_shown_as_nothing():
    text = text_of(watched([RunStart("s", 0.0, "out"), a_row(10, mfu=0.00034, rate=1e6)]))
    assert "0.00034 %" in text
    assert "0.0 %" not in text
