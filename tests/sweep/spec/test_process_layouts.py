"""Processes and layouts in the matrix, in names and in the report's columns, and which process ended a trial."""

import signal

import pytest

from flopwatch.errors import InputError
from flopwatch.records.trial import StepCost, content_key
from flopwatch.report.cells import column_names, group_key
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.spec.names import trial_names
from flopwatch.sweep.spec.parsing import needs_one_process
from flopwatch.sweep.supervisor.ranks import RankEnd, first_cause
from flopwatch.sweep.worker.rank_group import job_cost

SMALL = {"model": "tiny", "batch_size": [8], "seq_len": [16]}


def trials(**settings):
    return expand(read_matrix(None, {**SMALL, **settings}))


def test_a_single_process_has_no_layout_and_is_one_trial_of_all_layouts():
    specs = trials(processes=[1, 2], layout=["ddp", "fsdp"])
    assert [(spec.processes, spec.layout) for spec in specs] == [(1, None), (2, "ddp"), (2, "fsdp")]
    assert trial_names(specs) == [
        "StandardTrainer_bs8_seq16_processes1",
        "StandardTrainer_bs8_seq16_processes2_ddp",
        "StandardTrainer_bs8_seq16_processes2_fsdp",
    ]
    assert len({content_key(spec, {}) for spec in specs}) == 3


def test_a_batch_that_its_processes_cannot_share_is_refused_before_anything_runs():
    with pytest.raises(InputError, match=r"6 processes cannot share a batch of 8 samples"):
        trials(processes=6)
    kept = trials(batch_size=[8, 9], processes=[1, 2], exclude=["batch_size=9 processes=2"])
    assert [(spec.batch_size, spec.processes) for spec in kept] == [(8, 1), (9, 1), (8, 2)]


def test_an_unknown_layout_is_refused():
    with pytest.raises(InputError, match="layout"):
        trials(processes=2, layout="pipeline")


def test_a_command_starts_its_processes_itself_so_it_has_no_layout():
    (spec,) = trials(
        trainer=[{"command": "torchrun --nproc-per-node={processes} t.py"}], processes=3, layout="ddp,fsdp"
    )
    assert (spec.processes, spec.layout) == (3, None)


def test_a_private_trainer_cannot_run_in_several_processes():
    (several,), (single,) = trials(trainer="ghost", processes=2), trials(trainer="ghost")
    assert "can run in one process only" in needs_one_process(several)
    assert needs_one_process(single) is None


def test_the_report_compares_layouts_side_by_side_and_other_numbers_of_processes_apart():
    one, ddp, fsdp = trials(processes=[1, 2], layout=["ddp", "fsdp"])
    assert group_key(ddp) == group_key(fsdp) != group_key(one)
    columns = column_names({"one": one, "ddp": ddp, "fsdp": fsdp})
    assert columns == {"one": "standard", "ddp": "standard layout=ddp", "fsdp": "standard layout=fsdp"}


def raised(rank, at, *, lost_peer=False, kind="RuntimeError"):
    return RankEnd(rank, 1, {"type": kind, "message": "", "lost_peer": lost_peer, "unix_time": at})


@pytest.mark.parametrize(
    ("ends", "culprit"),
    [
        ([raised(0, 1.0, lost_peer=True), raised(1, 2.0, kind="ValueError")], 1),
        ([raised(0, 3.0), raised(1, 2.0), raised(2, 2.5)], 1),
        ([raised(0, 1.0, lost_peer=True), RankEnd(1, -signal.SIGKILL), RankEnd(2, -signal.SIGTERM)], 1),
        ([RankEnd(0, -signal.SIGABRT), RankEnd(1, -signal.SIGSEGV)], 1),
        ([RankEnd(0, -signal.SIGTERM), RankEnd(1, 3)], 1),
        ([raised(0, 2.0, lost_peer=True), raised(1, 1.0, lost_peer=True)], 1),
        ([RankEnd(0, 0), RankEnd(1, -signal.SIGTERM)], 1),
    ],
)
def test_the_first_cause_is_the_process_that_did_not_follow_another(ends, culprit):
    assert first_cause(ends).rank == first_cause(ends[::-1]).rank == culprit


def test_nobody_is_the_cause_when_all_went_well():
    assert first_cause([RankEnd(0, 0), RankEnd(1, 0)]) is None


def test_what_one_process_does_not_know_nobody_knows_of_the_job():
    whole, half = StepCost(model_flops=10, hardware_flops=11), StepCost(model_flops=10, notes=("compiled",))
    cost = job_cost([whole, half])
    assert (cost.model_flops, cost.hardware_flops, cost.notes) == (20, None, ("compiled",))
