"""What holds for every plan, whatever the matrix, the results in the folder and the choices."""

import tempfile
from pathlib import Path
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch.files import append_line
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY, UNSETTLED, Outcome, TrialResult, TrialSpec
from flopwatch.sweep.folder import write_trial_list
from flopwatch.sweep.runner.plan import DONE, GREEN, SOME_FAILED, exit_status, inferred_result, make_plan, trials_left

OUTCOMES = get_args(Outcome)
SPECS = st.lists(
    st.builds(TrialSpec, st.sampled_from(["standard", "ghost"]), st.just("tiny"), st.integers(1, 4), st.integers(1, 2)),
    min_size=1,
    max_size=10,
    unique_by=lambda spec: (spec.trainer, spec.batch_size, spec.seq_len),
)


@st.composite
def folders(draw):
    """A matrix, and the outcomes of those of its trials that have a result, by their place in the matrix."""
    specs = draw(SPECS)
    places = st.integers(0, len(specs) - 1)
    return specs, draw(st.dictionaries(places, st.sampled_from(OUTCOMES)))


def planned(folder, *choices):
    """A plan for each of these choices, of one folder; and the earlier outcomes by name."""
    specs, outcomes = folder
    with tempfile.TemporaryDirectory() as place:
        sweep = Path(place)
        trials = make_plan(sweep, specs).trials
        write_trial_list(sweep, trials, "local")
        for number, outcome in outcomes.items():
            trial = trials[number]
            append_line(sweep / "results.jsonl", TrialResult(trial.name, trial.key, trial.spec, outcome).to_json())
        plans = [make_plan(sweep, specs, **choice) for choice in choices]
    return plans, {trials[number].name: outcome for number, outcome in outcomes.items()}


def names(trials):
    return [trial.name for trial in trials]


@settings(deadline=None, max_examples=40)
@given(folders())
def test_every_trial_is_once_in_the_plan_and_either_runs_or_is_kept(folder):
    (plan,), earlier = planned(folder, {})
    assert len(set(names(plan.trials))) == len(plan.trials) == len(folder[0])
    assert sorted([*names(plan.todo), *plan.kept]) == sorted(names(plan.trials))
    assert {name: result.outcome for name, result in plan.kept.items()} == {
        name: outcome for name, outcome in earlier.items() if outcome not in UNSETTLED
    }, "what has settled is never run again"


@settings(deadline=None, max_examples=40)
@given(folders(), st.integers(0, 9), st.integers(1, 9))
def test_only_and_limit_choose_among_the_trials(folder, first, length):
    start = min(first, len(folder[0]) - 1)
    limit = f"{start}:{start + length}"
    wanted = {"failed": (*FAILED, "skipped"), "oom": OUT_OF_MEMORY, "missing": (None,)}
    plans, earlier = planned(folder, *({"only": only, "limit": limit} for only in wanted))
    asked = names(plans[0].trials)[start : start + length]
    for plan, outcomes in zip(plans, wanted.values(), strict=True):
        assert set(names(plan.todo)) == {name for name in asked if earlier.get(name) in outcomes}
        assert set(plan.kept) == set(earlier) - set(names(plan.todo)), "nothing that is not run again is forgotten"
        assert plan.again == {name for name in names(plan.todo) if name in earlier}


@settings(deadline=None, max_examples=40)
@given(folders(), st.data())
def test_a_sweep_is_green_only_if_every_trial_has_a_good_end(folder, data):
    (plan,), _ = planned(folder, {})
    ends = data.draw(st.lists(st.sampled_from(OUTCOMES), min_size=len(plan.todo), max_size=len(plan.todo)))
    counts = {outcome: ends.count(outcome) for outcome in ends}
    final = [*ends, *(result.outcome for result in plan.kept.values())]
    is_green = all(outcome in GREEN for outcome in final) and trials_left(plan, counts) == 0
    assert exit_status(plan, counts, was_stopped=False) == (DONE if is_green else SOME_FAILED)


@given(SPECS)
def test_what_is_inferred_is_larger_and_nothing_proves_itself(specs):
    (first, *others) = [TrialResult(str(number), "", spec, "oom_host") for number, spec in enumerate(specs)]
    assert inferred_result(first, [first]) is None
    for other in others:
        found, back = inferred_result(first, [other]), inferred_result(other, [first])
        assert found is None or back is None
        if found is not None:
            assert found.spec.batch_size >= other.spec.batch_size
            assert found.spec.seq_len >= other.spec.seq_len
            assert found.spec.trainer == other.spec.trainer
