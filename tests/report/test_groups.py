"""Groups of comparable trials: out-of-memory frontier, matrices, titles and columns."""

from dataclasses import replace

import pytest

from flopwatch.report.cells import METRICS, best_trials, cell_text, known_metrics
from flopwatch.report.sweep.measurements import frontier_words, matrix_rows, narrowed
from support.few_results import ended, group_of, ran, summary_of


def test_the_frontier_is_the_largest_that_ran_and_the_smallest_out_of_memory():
    points = {
        point.trainer: point
        for point in group_of(
            ran("standard", 4, 64),
            ran("standard", 8, 64),
            ended("standard", 16, 64, "oom_device"),
            ended("standard", 32, 64, "oom_inferred"),
            ran("ghost", 4, 64),
            ended("ghost", 8, 64, "error"),
            ended("dpsgd", 4, 64, "oom_inferred"),
        ).frontier
    }
    assert (points["standard"].largest_ok, points["standard"].smallest_oom) == (8, 16)
    assert [frontier_words(points[name]) for name in ("standard", "ghost", "dpsgd")] == [
        "8 (16 OOM)",
        "≥ 4",
        "none ran (4 OOM*)",
    ]


def test_a_limit_that_is_not_sharp_is_marked():
    (point,) = group_of(ran("ghost", 16, 64), ended("ghost", 8, 64, "oom_device")).frontier
    assert not point.is_monotone
    assert frontier_words(point) == "16 (8 OOM) !"


def test_cells_show_the_figure_or_how_the_trial_ended():
    group = group_of(
        ran("standard", 4, 64, 0.25, gib=3, mfu=0.4127),
        ended("dpsgd", 4, 64, "oom_inferred"),
        ended("ghost", 4, 64, "hang"),
        ran("fast", 4, 64, 0.5, spread=0.04),
    )
    (cells,) = matrix_rows(group).values()
    assert group.trainers == ("standard", "dpsgd", "ghost", "fast")
    assert [cell_text(cell, METRICS["time"]) for cell in cells] == ["250 ms ±1.0%", "OOM*", "hang", "~500 ms ±4%"]
    assert [cell_text(cell, METRICS["memory"]) for cell in cells] == ["3.00 GiB", "OOM*", "hang", "–"]
    assert cell_text(cells[0], METRICS["mfu"]) == "41.3 %"
    assert [metric.key for metric in known_metrics(group)] == ["memory", "time", "tokens", "mfu"]


def test_bold_is_the_best_of_a_class_only_where_it_is_clear():
    def best(dpsgd_seconds):
        group = group_of(
            ran("standard", 4, 64, 0.1),
            ran("dpsgd", 4, 64, dpsgd_seconds),
            ran("ghost", 4, 64, 1.0, name="ghost"),
            ran("fast", 4, 64, 9.0),
        )
        return best_trials(matrix_rows(group)[64, 4], METRICS["time"])

    assert best(2.0) == {"ghost"}
    assert best(1.01) == set(), "fast is clearly slower, dpsgd is not"


def test_models_dtypes_and_checkpointing_are_never_compared():
    summary = summary_of(
        ran("standard", 4, 64, name="a"),
        ran("standard", 4, 64, name="b", dtype="bf16"),
        ran("standard", 4, 64, name="c", model="small"),
        ran("standard", 4, 64, name="d", checkpointing=True),
    )
    assert sorted(group.title for group in summary.groups) == [
        "small, fp32, no checkpointing",
        "tiny, bf16, no checkpointing",
        "tiny, fp32, checkpointing",
        "tiny, fp32, no checkpointing",
    ]


def test_options_that_vary_make_columns_of_their_own():
    group = group_of(
        ran("ghost", 4, 64, name="a", options={"max_grad_norm": 0.1, "lr": 1}),
        ran("ghost", 4, 64, name="b", options={"max_grad_norm": 1.0, "lr": 1}),
        ran("standard", 4, 64, name="c"),
    )
    assert group.trainers == ("standard", "ghost max_grad_norm=0.1", "ghost max_grad_norm=1.0")


def test_the_long_names_of_the_documents_are_shown_short_and_own_labels_as_they_are():
    group = group_of(
        ran("ghost", 4, 64, label="DPGhostClippingTrainer", name="a"), ran("ghost", 8, 64, label="mine", name="b")
    )
    assert set(group.trainers) == {"ghost", "mine"}


def test_results_of_different_environments_are_compared_with_a_warning():
    a, b = {"torch": "2.13", "device": "L4", "host": "x"}, {"torch": "2.14", "device": "L4", "host": "y"}
    summary = summary_of(ran("standard", 4, 64, environment=a), ran("ghost", 4, 64, environment=b))
    assert summary.warnings == ("tiny, fp32: the compared trials ran with different torch: 2.13 (1), 2.14 (1)",)
    assert [one.trials for one in summary.environments] == [1, 1]
    hosts = summary_of(ran("standard", 4, 64, environment=a), ran("ghost", 4, 64, environment={**a, "host": "z"}))
    assert "2 hosts" in hosts.warnings[0]
    alike = summary_of(ran("standard", 4, 64, environment=a), ran("ghost", 4, 64, environment=a))
    assert alike.warnings == ()


def test_hundreds_of_options_are_not_laid_side_by_side():
    trials = ((seq, lr) for lr in range(300) for seq in (64, 128))
    summary = summary_of(*(ran("ghost", 4, seq, options={"lr": lr}, gib=1, name=f"{seq}_{lr}") for seq, lr in trials))
    (group,) = summary.groups
    assert len(group.trainers) == 300
    assert "there are 300 combinations of trainers and options: only the first 16 are shown" in summary.warnings[0]
    assert len(narrowed(group).trainers) == 16
    assert len(narrowed(group).cells) == 32


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("python train.py --batch {batch_size}", "shell command"),
        ("python train.py --model {model}", "tiny"),
        ("python train.py --model {model} --dtype {dtype}", "tiny, fp32"),
    ],
)
def test_trials_of_commands_are_only_named_after_settings_that_the_commands_take(command, title):
    result = ran("command", 8, 64)
    result = replace(result, spec=replace(result.spec, command=command))
    summary = summary_of(result)
    assert [group.title for group in summary.groups] == [title]
    (row,) = summary.rows
    assert {row.model, row.dtype} - {""} == set(title.split(", ")) - {"shell command"}


def test_a_command_beside_a_trainer_is_in_the_group_of_the_trainer():
    result = ran("command", 8, 64)
    result = replace(result, spec=replace(result.spec, command="python train.py"))
    assert [group.title for group in summary_of(ran("standard", 8, 64), result).groups] == ["tiny, fp32"]
