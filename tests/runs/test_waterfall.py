"""The waterfall of a run: losses and MFU add up to 100 % of the peak, whatever the log says."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.records.metrics import AT_PEAK, LOST, OF_STEPS
from flopwatch.records.time_uses import LOSSES
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import waterfall_of
from support.ledgers import CPU, log_of
from support.make_run_log import PEAK

KEYS = tuple(dict.fromkeys((*LOST, *OF_STEPS, *AT_PEAK)))
USES = (
    *("matmul_seconds", "attention_seconds", "other_kernel_seconds", "optimizer_seconds"),
    *("exposed_communication_seconds", "copy_seconds", "idle_seconds"),
)


def points_of(waterfall):
    return {loss.key: loss.points for loss in waterfall.losses}


def random_seconds(chance):
    """Seconds by use that need not fit to each other: parts may be larger than their whole."""
    seconds = {key: 10 ** chance.uniform(-4, 4) for key in KEYS if chance.random() < 0.7}
    seconds |= {"wall": 10 ** chance.uniform(0, 5), "model_at_peak": 10 ** chance.uniform(-2, 4)}
    if chance.random() < 0.5:  # as a real log: train is larger than its parts, and wall is larger than all
        seconds["train"] = sum(seconds.get(key, 0.0) for key in (*OF_STEPS, "model_at_peak"))
        seconds["wall"] = sum(seconds.get(key, 0.0) for key in ("train", *LOST)) * chance.uniform(1, 2)
    if chance.random() < 0.1:
        seconds[chance.choice(KEYS)] = chance.choice([-5.0, float("nan"), float("inf"), 0.0])
    return seconds


def random_trace(chance, rank):
    uses = {use: 10 ** chance.uniform(-6, 1) * (chance.random() < 0.7) for use in USES}
    return TraceSplit("trace.json", rank, "cuda", 3, sum(uses.values()), **uses)


def random_run(seed):
    chance = random.Random(seed)
    tokens = chance.choice([None, 1000])
    log = log_of(
        random_seconds(chance),
        tokens=tokens,
        real_tokens=None if tokens is None else chance.choice([None, 700, 1000]),
        achievable=chance.choice([None, 0.7 * PEAK["flops_per_s"], 2 * PEAK["flops_per_s"]]),
    )
    return log, [random_trace(chance, rank) for rank in range(chance.choice([0, 0, 1, 2]))]


AMOUNTS = st.floats(1e-4, 1e5) | st.sampled_from([0.0, -5.0, math.nan, math.inf])
TRACES = st.lists(st.fixed_dictionaries({use: st.floats(0, 10) for use in USES}), max_size=2)


@given(
    seconds=st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, AMOUNTS)),
    needed=st.fixed_dictionaries({"wall": st.floats(1, 1e5), "model_at_peak": st.floats(1e-2, 1e4)}),
    tokens=st.sampled_from([(None, None), (1000, None), (1000, 700), (1000, 1000)]),
    achievable=st.sampled_from([None, 0.7 * PEAK["flops_per_s"], 2 * PEAK["flops_per_s"]]),
    fits=st.booleans(),
    traces=TRACES,
)
def test_losses_and_mfu_of_any_run_add_up_to_100(seconds, needed, tokens, achievable, fits, traces):
    if fits:  # as in a real log, the wall time has room for all parts
        needed["wall"] += sum(amount for amount in seconds.values() if 0 < amount < math.inf)
    log = log_of(seconds | needed, tokens=tokens[0], real_tokens=tokens[1], achievable=achievable)
    splits = [TraceSplit("trace.json", rank, "cuda", 3, sum(uses.values()), **uses) for rank, uses in enumerate(traces)]
    waterfall = waterfall_of(log, splits)
    points = points_of(waterfall)
    assert math.fsum(points.values()) + waterfall.mfu_percent == pytest.approx(100, abs=0.1)
    negative = [key for key, value in points.items() if value < 0]
    if negative:
        assert negative == ["below_peak"]
        assert any("peak is too low" in note for note in waterfall.notes)
    assert waterfall == waterfall_of(log, splits), "the same log gives the same waterfall"
    assert all(loss.name and loss.evidence.endswith(".") for loss in waterfall.losses)


def test_random_runs_have_every_loss_and_every_kind_of_trouble():
    found = [waterfall for seed in range(200) if (waterfall := waterfall_of(*random_run(seed))) is not None]
    assert {loss.key for waterfall in found for loss in waterfall.losses} == set(LOSSES)
    assert sum(waterfall.points("below_peak") < 0 for waterfall in found) > 10
    assert sum(bool(waterfall.traced) for waterfall in found) > 50


SECONDS = {
    "wall": 1000.0,
    "start_up": 20.0,
    "eval": 60.0,
    "train": 900.0,
    "input_wait": 100.0,
    "divided": 700.0,
    "optimizer": 70.0,
    "host": 7.0,
    "model_at_peak": 300.0,
    "hardware_at_peak": 360.0,
    "recompute_at_peak": 60.0,
}


def test_every_second_is_booked_once():
    assert points_of(waterfall_of(log_of(SECONDS))) == pytest.approx(
        {
            "start_up": 2.0,
            "eval": 6.0,
            "other": 2.0,
            "input_wait": 10.0,
            "recompute": 6.0,
            "optimizer": 8.0,
            "host": 0.8,
            "below_peak": 35.2,
        }
    )


def test_input_wait_is_not_booked_again_as_idle_time_of_the_trace():
    trace = TraceSplit(
        "a", 0, "cuda", 3, 0.9, matmul_seconds=0.5, other_kernel_seconds=0.2, optimizer_seconds=0.08, idle_seconds=0.12
    )
    points = points_of(waterfall_of(log_of(SECONDS), [trace]))
    assert points["input_wait"] == pytest.approx(10.0)
    # of 352 s to divide, the trace shows 140 s of slow matmuls, 200 s of other kernels, 12 s idle
    assert points["slow_matmuls"] == pytest.approx(14.0, abs=0.1)
    assert points["other_kernels"] == pytest.approx(20.0, abs=0.1)
    assert points["idle"] == pytest.approx(1.2, abs=0.1)
    assert "below_peak" not in points


def test_a_trace_gives_the_optimizers_time_where_no_clock_did():
    without = {name: value for name, value in SECONDS.items() if name not in ("divided", "optimizer", "host")}
    trace = TraceSplit("a", 0, "cuda", 3, 0.9, matmul_seconds=0.36, optimizer_seconds=0.44, idle_seconds=0.1)
    points = points_of(waterfall_of(log_of(without), [trace]))
    assert points["optimizer"] == pytest.approx(44.0, abs=0.1)


def test_the_measured_peak_is_a_loss_of_its_own():
    points = points_of(waterfall_of(log_of(SECONDS, achievable=0.75 * PEAK["flops_per_s"])))
    assert points["achievable"] == pytest.approx(12.0)
    assert points["below_peak"] == pytest.approx(23.2)


def test_a_clock_that_was_set_back_is_said():
    waterfall = waterfall_of(log_of({**SECONDS, "wall": 500.0}))
    assert waterfall.wall_seconds == pytest.approx(980.0)
    assert any("add up to 8 min 00 s more than the wall time" in note for note in waterfall.notes)


@pytest.mark.parametrize("missing", ["wall", "model_at_peak"])
def test_without_wall_time_or_flops_there_is_no_waterfall(missing):
    assert waterfall_of(log_of({key: value for key, value in SECONDS.items() if key != missing})) is None


def test_the_notes_say_what_limits_the_figures():
    notes = waterfall_of(
        log_of(SECONDS, exact=False, notes=("ops without a formula.",), peak=CPU, environment={"device": "cpu"})
    ).notes
    assert any(note.startswith("The FLOPs are not exact: ops without a formula. ") for note in notes)
    assert any("`flopwatch trace runs/one`" in note for note in notes)
    assert any("peak is that of the whole CPU: 2 cores x 2.5 GHz" in note for note in notes)
    trace = TraceSplit("a", 0, "cuda", 3, 0.9, matmul_seconds=0.5, other_kernel_seconds=0.3, idle_seconds=0.1)
    assert not any("flopwatch trace" in note for note in waterfall_of(log_of(SECONDS), [trace]).notes)


def test_what_was_not_measured_is_said_to_be_part_of_other_losses():
    unknown = {
        key: value for key, value in SECONDS.items() if key not in ("input_wait", "divided", "optimizer", "host")
    }
    notes = waterfall_of(log_of(unknown)).notes
    assert any(note.startswith("The input wait of this run was not measured") for note in notes)
    assert any(note.startswith("The time of the optimizer is unknown") for note in notes)
    assert not any("unknown" in note for note in waterfall_of(log_of({**SECONDS, "input_wait": 0.0})).notes)


TRACE = TraceSplit("step9_rank0.pt.trace.json.gz", 0, "cuda", 3, 10.0, matmul_seconds=6.0, idle_seconds=4.0)


def test_a_trace_that_an_earlier_run_left_in_the_folder_is_not_used():
    log = log_of(SECONDS)  # it began at 1.0
    waterfall = waterfall_of(log, [replace(TRACE, written_unix_time=0.5)])

    assert waterfall.traced == ()
    assert waterfall.points("idle") == 0
    assert any("older than this run" in note for note in waterfall.notes)
    assert waterfall_of(log, [replace(TRACE, written_unix_time=2.0)]).points("idle") > 0
    assert waterfall_of(log, [TRACE]).points("idle") > 0, "the user has named the file"


def test_if_the_peak_has_changed_a_note_says_so_and_no_loss_relies_on_the_newest_one():
    log = log_of(SECONDS, achievable=0.7 * PEAK["flops_per_s"])
    (newest,) = log.provenances
    before = replace(newest, peak={**PEAK, "flops_per_s": 1e12}, achievable_flops_per_s=None)
    waterfall = waterfall_of(replace(log, provenances=(before, replace(newest, step=500))))

    assert waterfall_of(log).points("achievable") > 0
    assert waterfall.points("achievable") == 0
    assert any("The peak has changed during this run (1.0 TFLOP/s, 989.4 TFLOP/s)" in note for note in waterfall.notes)
