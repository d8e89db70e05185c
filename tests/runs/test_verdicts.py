"""Verdicts: each situation gets the one that fits, and none is given where the data does not support one."""

import re

import pytest

from flopwatch.numbers import duration
from flopwatch.records.time_uses import LOSSES
from flopwatch.runs.advice import LEAST_STEPS, conclusion_of, verdict_of
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import how_to_trace, waterfall_of
from support.ledgers import log_of
from support.make_run_log import PEAK

# A run of 1,000 s with 52 % MFU: few losses besides passes that are as slow as in other good runs.
GOOD = {
    "wall": 1000.0,
    "start_up": 10.0,
    "eval": 15.0,
    "checkpoint": 5.0,
    "train": 970.0,
    "input_wait": 8.0,
    "divided": 960.0,
    "optimizer": 40.0,
    "host": 2.0,
    "model_at_peak": 520.0,
    "hardware_at_peak": 520.0,
}


def longer(**more):
    """The good run, in which these uses take so much longer; the wall time and the time in steps grow with them."""
    seconds = dict(GOOD)
    for name, extra in more.items():
        seconds[name] = seconds.get(name, 0.0) + extra
    in_steps = sum(more.get(name, 0.0) for name in ("input_wait", "compile", "stall"))
    in_steps += sum(more.get(name, 0.0) for name in ("optimizer", "host"))
    seconds["divided"] += sum(more.get(name, 0.0) for name in ("optimizer", "host"))
    seconds["train"] += in_steps
    seconds["wall"] += sum(more.values())
    return seconds


def executes(again=0.0, besides=0.0):
    """The good run with FLOPs that are recomputed, or are not the model's; all steps take accordingly longer."""
    extra = (again + besides) / 0.6
    return {
        **GOOD,
        "wall": GOOD["wall"] + extra,
        "train": GOOD["train"] + extra,
        "divided": GOOD["divided"] + extra,
        "hardware_at_peak": GOOD["hardware_at_peak"] + again + besides,
        "recompute_at_peak": again,
    }


def slow(seconds_at_peak):
    return {**GOOD, "model_at_peak": seconds_at_peak, "hardware_at_peak": seconds_at_peak}


def passes(seconds, outside=1.0):
    """The run with timed passes, and so many seconds outside of them."""
    return {**seconds, "passes_timed": seconds["divided"], "outside_passes": outside}


def trace(**shares):
    uses = {f"{use}_seconds": share for use, share in shares.items()}
    return TraceSplit("step9_rank0.pt.trace.json.gz", 0, "cuda", 3, sum(shares.values()), **uses)


SITUATIONS = {
    "the loader is slow": (longer(input_wait=600.0), {}, "input_wait", "the loader cannot keep up"),
    "evaluation is long": (longer(eval=600.0), {}, "eval", "the training evaluates often, or for long"),
    "checkpoints are slow": (longer(checkpoint=600.0), {}, "checkpoint", "waits while they are written"),
    "the run was killed often": (longer(restart=200.0, rerun=400.0), {}, "restart", "done again"),
    "start-up is long": (longer(start_up=600.0), {}, "start_up", "the run is short"),
    "it compiles again and again": (longer(compile=600.0), {}, "compile", "steps with new shapes"),
    "an evaluation compiles": (longer(compile_outside=600.0), {}, "compile_outside", "or in an evaluation"),
    "single steps stall": (longer(stall=600.0), {}, "stall", "more than 5 times as long"),
    "the optimizer is slow": (longer(optimizer=600.0), {}, "optimizer", "compared with forward and backward"),
    "logging after each step": (longer(host=600.0), {}, "host", "holds up every step"),
    "a phase without a name": (longer(outside=600.0), {}, "outside", "has no name yet"),
    "time that nobody knows": ({**GOOD, "wall": 1600.0}, {}, "other", "the log does not say"),
    "half of the tokens are padding": (
        executes(besides=520.0),
        {"tokens": 100, "real_tokens": 50},
        "padding",
        "tokens that do not count",
    ),
    "layers are recomputed": (executes(again=400.0), {}, "recompute", "computes again what was not kept"),
    "private training": (executes(besides=800.0), {}, "extra_passes", "extra passes of private training"),
    "many steps have no FLOPs": ({**slow(300.0), "unpriced": 400.0}, {}, "unpriced", "cannot be counted"),
    "a good run": (GOOD, {}, "healthy", "Nothing large is left to gain"),
    "slow passes without a trace": (passes(slow(200.0)), {}, "below_peak", "a trace shows what takes the time"),
    "slow passes that were not timed": (slow(200.0), {}, "below_peak", "was not measured, and is part of this"),
    "batches are fetched between the passes": (passes(slow(200.0), 500.0), {}, "between", "such as fetching its batch"),
    "a trace with gaps": (
        passes(slow(200.0)),
        {"traces": [trace(matmul=30.0, other_kernel=10.0, optimizer=4.0, idle=53.0)]},
        "idle",
        "does not launch work fast enough",
    ),
    "a trace with gaps in passes that were not timed": (
        slow(200.0),
        {"traces": [trace(matmul=30.0, other_kernel=10.0, optimizer=4.0, idle=53.0)]},
        "idle",
        "input wait between the passes of a step was not measured",
    ),
    "a trace with gaps between the passes": (
        passes(slow(200.0), 500.0),
        {"traces": [trace(matmul=30.0, other_kernel=10.0, optimizer=4.0, idle=53.0)]},
        "between",
        "such as fetching its batch",
    ),
    "a trace full of small kernels": (
        slow(200.0),
        {"traces": [trace(matmul=30.0, other_kernel=60.0, optimizer=4.0, idle=3.0)]},
        "other_kernels",
        "memory-bound",
    ),
    "a trace with slow matmuls": (
        slow(200.0),
        {"traces": [trace(matmul=82.0, other_kernel=8.0, optimizer=4.0, idle=3.0)]},
        "slow_matmuls",
        "do not suit the device",
    ),
    "a trace with exposed communication": (
        slow(200.0),
        {"traces": [trace(matmul=25.0, exposed_communication=60.0, optimizer=4.0, idle=3.0)]},
        "exposed_communication",
        "the devices wait",
    ),
    "a trace with copies": (
        slow(200.0),
        {"traces": [trace(matmul=25.0, copy=60.0, optimizer=4.0, idle=3.0)]},
        "copies",
        "nothing is computed meanwhile",
    ),
    "the peak is too low": (slow(1200.0), {}, "peak_too_low", "The peak is too low to judge this run"),
    "two large losses": (longer(input_wait=400.0, eval=420.0), {}, "two_losses", "could be gained from either"),
    "many small losses": (
        longer(start_up=30.0, checkpoint=35.0, pause=40.0, stall=40.0, outside=40.0, host=38.0),
        {},
        "many_losses",
        "No single loss stands out",
    ),
}


def judged(seconds, *, traces=(), **more):
    log = log_of(seconds, **more)
    waterfall = waterfall_of(log, traces)
    return verdict_of(log, waterfall), waterfall


@pytest.mark.parametrize(("seconds", "more", "key", "words"), SITUATIONS.values(), ids=SITUATIONS)
def test_a_situation_gets_its_verdict(seconds, more, key, words):
    verdict, waterfall = judged(seconds, **more)
    assert not isinstance(verdict, str)
    assert verdict.key == key, (verdict, {loss.key: round(loss.points, 1) for loss in waterfall.losses})
    assert words in verdict.sentence
    assert verdict.sentence.endswith(".")
    keys = ("stall", "outside", "between") if "passes_timed" in seconds else ("stall", "outside", "below_peak", "idle")
    places = [loss.key for loss in waterfall.losses if loss.key in keys and loss.points > 0.05]
    has_other_places = key in places and len(places) > 1
    assert ("at most" in verdict.reservation) == has_other_places, "one place alone has its points in the verdict"


def test_every_loss_but_three_is_the_verdict_of_a_situation():
    keys = {key for _, _, key, _ in SITUATIONS.values()}
    # No training can change the datasheet; counting and pauses read like the other times between steps.
    assert set(LOSSES) - keys == {"achievable", "count", "pause"}


def test_the_sentence_has_the_points_of_the_waterfall():
    verdict, waterfall = judged(longer(input_wait=600.0))
    points = f"{waterfall.points('input_wait'):.0f} points"
    assert verdict.sentence == f"Waiting for input costs {points}: the loader cannot keep up. Nothing else costs more."


def test_two_losses_are_both_named_largest_first():
    verdict, _ = judged(longer(input_wait=400.0, eval=420.0))
    assert verdict.losses == ("eval", "input_wait")
    assert verdict.sentence == (
        "Evaluation costs 24 points: the training evaluates often, or for long. Waiting for input costs 22 points: the "
        "loader cannot keep up. About as much could be gained from either."
    )


def test_each_of_two_losses_is_a_whole_sentence_and_has_its_own_next_step():
    """Fragments that were written for one subject were glued: "they" and "it" meant the other loss."""
    log = log_of(passes(slow(260.0), 200.0))
    said = conclusion_of(log, waterfall_of(log))
    assert set(said.verdict.losses) == {"between", "below_peak"}
    first, second, together = re.split(r"(?<=\.) ", said.sentence)
    assert first.startswith("Time between the passes costs 20 points: the step does something outside of")
    assert second == "Slow forward and backward passes cost 46 points: a trace shows what takes the time."
    assert together == "About as much could be gained from either."
    assert said.next_step == " ".join(LOSSES[key].advice.format(trace=how_to_trace(log)) for key in said.verdict.losses)


CORES = {"device": "cpu", "threads": 1, "device_units": 2}


@pytest.mark.parametrize(
    ("processor", "environment", "words"),
    [
        (990.0, CORES, ["1 thread, and the peak is that of 2 cores", "OMP_NUM_THREADS=2"]),
        (250.0, CORES, ["OMP_NUM_THREADS=2", "ran on 0.25 cores: other processes use this machine"]),
        (900.0, {**CORES, "threads": 2}, ["ran on 0.90 cores"]),
        (1900.0, {**CORES, "threads": 2}, ["a trace shows what takes the time"]),
        (250.0, {**CORES, "device": "cuda"}, ["a trace shows what takes the time"]),
    ],
)
def test_on_a_cpu_the_verdict_says_which_cores_are_not_used(processor, environment, words):
    log = log_of({**passes(slow(200.0)), "processor": processor}, environment=environment)
    said = conclusion_of(log, waterfall_of(log))
    assert said.verdict.key == "below_peak"
    assert [word for word in words if word not in said.sentence] == []
    assert not any(word in note for word in words for note in said.notes), "once is enough"


def test_a_loss_that_is_not_the_largest_bar_is_not_called_so():
    verdict, waterfall = judged(longer(input_wait=150.0))
    assert waterfall.largest(1)[0].key == "below_peak"
    assert verdict.key == "input_wait"
    assert "Nothing else costs more" not in verdict.sentence


def test_the_achievable_peak_says_how_fast_good_passes_are():
    seconds = slow(400.0)  # 42 % of the peak in steps
    assert judged(seconds)[0].key == "below_peak"
    assert judged(seconds, achievable=0.55 * PEAK["flops_per_s"])[0].key == "healthy"


def test_what_good_runs_lose_too_is_taken_off_once():
    # 28 points of slow matmuls and 24 of other kernels: either alone would be usual at 40 % MFU, both are not.
    split = trace(matmul=68.0, other_kernel=24.0, optimizer=4.0, idle=1.0)
    verdict, waterfall = judged(slow(400.0), traces=[split])
    assert max(waterfall.points(key) for key in ("slow_matmuls", "other_kernels")) < 40
    assert verdict.key == "other_kernels"


@pytest.mark.parametrize("situation", ["the loader is slow", "a good run", "the peak is too low"])
@pytest.mark.parametrize("steps", [0, 1, LEAST_STEPS - 1])
def test_too_few_steps_support_no_verdict(situation, steps):
    log = log_of(SITUATIONS[situation][0], steps=steps)
    said = conclusion_of(log, waterfall_of(log))
    assert said.verdict is None
    assert "a verdict needs 20" in said.sentence


def test_less_than_a_minute_in_steps_supports_no_verdict():
    seconds = {name: value * 55 / 1570 for name, value in longer(input_wait=600.0).items()}
    log = log_of(seconds)
    said = conclusion_of(log, waterfall_of(log))
    assert said.verdict is None
    assert said.sentence == "No verdict: the run has spent 55 s in steps, and a verdict needs 60 s."
    assert verdict_of(log, waterfall_of(log), least_seconds=55.0).key == "input_wait"


def test_an_unknown_peak_supports_no_verdict():
    log = log_of({name: value for name, value in GOOD.items() if not name.endswith("at_peak")}, peak=None)
    assert waterfall_of(log) is None
    assert conclusion_of(log, None).verdict is None
    assert "so there is no MFU" in conclusion_of(log, None).sentence


def test_with_flops_that_are_not_exact_the_verdict_is_about_time_and_says_so():
    verdict, _ = judged(longer(input_wait=600.0), exact=False, notes=("an estimate",))
    assert verdict.key == "input_wait"
    assert "not exact" in verdict.reservation


@pytest.mark.parametrize("knows_input_wait", [True, False])
def test_waits_that_were_not_seen_are_bounded_by_stalled_steps_too(knows_input_wait):
    """Every 20th fetch of a bursty loader is so slow that its step counts as stalled, and is not divided."""
    seconds = {**passes(longer(stall=600.0), outside=96.0), "outside": 50.0, "wall": 1650.0}
    if not knows_input_wait:
        del seconds["input_wait"]
    verdict, waterfall = judged(seconds)
    places = [loss for loss in waterfall.losses if loss.key in ("outside", "stall", "between")]
    bound = sum(loss.points for loss in places)
    assert (verdict.key, len(places)) == ("stall", 3)
    if knows_input_wait:
        assert '"work between steps" and "stalled steps" and "between the passes"' in verdict.reservation
        assert f"after warm-up at most {bound:.0f} points" in verdict.reservation
    else:
        assert verdict.reservation == "", "the note says it"
    notes = [note for note in waterfall.notes if note.startswith("The input wait of this run was not measured")]
    assert len(notes) == (not knows_input_wait)
    together = duration(sum(loss.seconds for loss in places))
    assert all(f'"stalled steps" and "between the passes", after warm-up at most {together}.' in note for note in notes)
