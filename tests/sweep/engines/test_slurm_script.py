import subprocess
from pathlib import Path

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.sweep.engines.slurm import Requests


def spec(**settings):
    return TrialSpec("standard", "tiny", 1, 1, **settings)


def requested(requests, **settings):
    """Cores, GPUs, memory and minutes as sbatch gets them."""
    asked = requests.options(spec(**settings))
    return tuple(asked[key] for key in ("cpus-per-task", "gres", "mem", "time"))


def test_slurm_gives_more_time_and_memory_than_our_own_limits():
    limits = Limits(wall_seconds=600.0, memory_bytes=1 << 30)
    assert requested(Requests(), limits=limits) == (None, None, f"{1024 + 256}M", 12)


def test_without_limits_the_site_decides():
    assert requested(Requests(), limits=Limits(wall_seconds=None)) == (None, None, None, None)


def test_the_trial_goes_before_the_engine_and_a_share_of_a_gpu_is_a_whole_one():
    engine = Requests(cpus_per_trial=2, gpus_per_trial=3, memory_megabytes=100, time_minutes=5)
    assert requested(engine, cpus=4, gpus=0.5) == (4, "gpu:1", "100M", 5)
    assert requested(engine) == (2, "gpu:3", "100M", 5)


def text(tmp_path, **changes):
    requests = Requests(cpus_per_trial=2, gpus_per_trial=1, memory_megabytes=500, time_minutes=10, **changes)
    return requests.script("name", tmp_path / "batch.names", 3, ["printf", "%s|"], requests.options(spec()))


def options(script_text):
    return [line.removeprefix("#SBATCH --") for line in script_text.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_what_the_trial_needs_and_may_be_requeued_unless_the_user_says_no(tmp_path):
    asked = options(text(tmp_path, array_parallelism=2, partition="long", extra={"account": "lab", "exclusive": True}))
    for option in ("array=0-2%2", "partition=long", "cpus-per-task=2", "gres=gpu:1", "mem=500M", "time=10"):
        assert option in asked
    assert {"requeue", "open-mode=append", "account=lab", "exclusive"} <= set(asked)
    told = options(text(tmp_path, extra={"no_requeue": True}))
    assert "no-requeue" in told
    assert "requeue" not in told


def test_an_extra_option_goes_before_ours_and_none_leaves_it_out(tmp_path):
    asked = options(text(tmp_path, extra={"gres": "gpu:a100:1", "mem": None}))
    assert "gres=gpu:a100:1" in asked
    assert not [option for option in asked if option.startswith("mem")]


def test_each_task_runs_the_name_and_attempt_in_its_line_whatever_the_name_holds(tmp_path):
    names = ["plain", 'it\'s $HOME `x` "q" 100%', "ünï"]
    (tmp_path / "batch.names").write_text("".join(f"{name} token\n" for name in names))
    file = Path(tmp_path / "a script")
    file.write_text(text(tmp_path))
    for index, name in enumerate(names):
        answer = subprocess.run(
            ["sh", file], env={"SLURM_ARRAY_TASK_ID": str(index), "PATH": "/usr/bin:/bin"}, capture_output=True
        )
        assert answer.stdout.decode() == f"{name}|token|"
