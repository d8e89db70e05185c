"""Texts as slurm 22.05 printed them."""

from flopwatch.sweep.engines.slurm import (
    Accounted,
    Queued,
    job_lists,
    read_bytes,
    read_sacct,
    read_scontrol,
    read_squeue,
)

SACCT = """\
85_0|TIMEOUT|0:0||n1
85_0.batch|CANCELLED|0:15|4500K|n1
85_1|FAILED|0:9||n1
85_1.batch|FAILED|0:9|225196K|n1
85_1.0|FAILED|0:9|1.5G|n1
86_3|CANCELLED by 0|0:0||None assigned
86_[4-7]|PENDING|0:0||None assigned
87_0|FAILED|7:0||n[1-2]
"""


def test_steps_are_folded_into_their_task():
    assert read_sacct(SACCT)["85_1"] == Accounted("FAILED", None, 9, 3 << 29, "n1")
    assert read_sacct(SACCT)["85_0"] == Accounted("TIMEOUT", 0, None, 4500 << 10, "n1")


def test_what_slurm_does_not_tell_is_none():
    assert read_sacct(SACCT)["86_3"] == Accounted("CANCELLED", 0, None, None, None)


def test_an_exit_code_and_nodes_are_read():
    assert read_sacct(SACCT)["87_0"] == Accounted("FAILED", 7, None, None, "n[1-2]")


def test_tasks_that_have_not_begun_are_left_out():
    assert set(read_sacct(SACCT)) == {"85_0", "85_1", "86_3", "87_0"}


def test_lines_of_another_shape_are_left_out():
    assert read_sacct("sacct: error: slurm_persist_conn_open_without_init\n\n1_0|RUNNING\n") == {}


def test_a_state_tells_whether_the_task_is_over():
    assert [Accounted(state).is_over for state in ("RUNNING", "COMPLETING", "NODE_FAIL", "COMPLETED")] == [
        *(False, False, True, True)
    ]


def test_the_queue_is_read_also_with_a_bar_in_the_path():
    text = "12_0|RUNNING|/data/a|b/slurm/x.sh\n12_1|PENDING|/data/a|b/slurm/x.sh\n"
    assert read_squeue(text) == [
        Queued("12_0", False, "/data/a|b/slurm/x.sh"),
        Queued("12_1", True, "/data/a|b/slurm/x.sh"),
    ]


def test_scontrol_names_the_task_by_its_array():
    text = (
        "JobId=85 ArrayJobId=84 ArrayTaskId=1 JobName=a b JobState=FAILED Reason=None ExitCode=0:9 NodeList=n1\n"
        "JobId=84 ArrayJobId=84 ArrayTaskId=2-5%4 JobState=PENDING ExitCode=0:0 NodeList=(null)\n"
    )
    assert read_scontrol(text) == {"84_1": Accounted("FAILED", None, 9, host="n1")}
    assert read_scontrol("slurm_load_jobs error: Invalid job id specified") == {}


def test_amounts_that_are_none_are_none():
    assert [read_bytes(text) for text in ("", "0", "12K", "x")] == [None, 0, 12288, None]


def test_arrays_are_asked_for_whole_and_in_order():
    assert job_lists(["10_3", "9_0", "10_4"]) == [["9", "10"]]
    assert [len(jobs) for jobs in job_lists(f"{number}_0" for number in range(1200))] == [500, 500, 200]
