"""The command printed for a failed trial works from anywhere, and keeps the earlier attempt."""

import json
import shlex

import pytest

from flopwatch.records.sweep_results import read_results
from support.warm_sweep import WITHOUT_TORCH, flopwatch_warm

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    for name in ("started", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "started")
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def run(*words):
    done = flopwatch_warm(*words, modules=WITHOUT_TORCH)
    return done.returncode, done.stdout + done.stderr


def test_the_printed_command_works_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "started" / "job.sh").write_text("test -e mended && pwd")
    words = ("sweep", "--command", "sh job.sh", "--batch-size=1", "--seq-len=8", "-o", "s")
    assert run(*words)[0] == 1
    (result,) = read_results(tmp_path / "started" / "s").values()
    (tmp_path / "started" / "mended").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(*shlex.split(result.command)[1:])[0] == 0
    assert (tmp_path / "started/s/logs/Command_bs1_seq8.log").read_text() == f"{tmp_path / 'started'}\n"
    monkeypatch.chdir(tmp_path / "started")
    code, text = run(*words)
    assert (code, "1 of 1 trials already have results" in text) == (0, True), (
        "the sweep knows the new result as its own"
    )


def test_an_attempt_by_hand_is_the_result_and_the_earlier_one_is_kept(tmp_path):
    words = ("sweep", "--command", "echo first; test ! -e broken", "--batch-size=1", "--seq-len=8", "-o", "s")
    assert run(*words)[0] == 0
    sweep = tmp_path / "started" / "s"
    before = json.loads((sweep / "trials/Command_bs1_seq8/result.json").read_text())
    (tmp_path / "started" / "broken").touch()
    code, text = run("trial", "--spec", str(sweep / "trials/Command_bs1_seq8/spec.json"))
    assert code == 1
    assert "error (left with exit code 1)" in text
    assert [result.outcome for result in read_results(sweep).values()] == ["error"]
    assert json.loads((sweep / "earlier/Command_bs1_seq8.1/result.json").read_text()) == before


def test_a_trial_by_hand_does_not_displace_another_configuration_of_the_same_name(tmp_path):
    words = ("--command", "echo first", "--batch-size=1", "--seq-len=8", "-o", "s")
    assert run("sweep", *words)[0] == 0
    sweep = tmp_path / "started" / "s"
    before = (sweep / "results.jsonl").read_bytes()
    code, text = run("trial", *words, "--steps", "99")
    assert code == 2
    assert "steps was 10, is 99" in text
    assert "choose another folder with --output" in text
    assert (sweep / "results.jsonl").read_bytes() == before
    assert not (sweep / "earlier").exists()
    assert run("trial", *words)[0] == 0


def test_a_trial_that_runs_on_another_host_does_not_carry_this_ones_devices(tmp_path):
    assert run("sweep", "--command", "true", "--batch-size=1", "--seq-len=8", "-o", "s")[0] == 0
    sweep = tmp_path / "started" / "s"
    assert "cpu" not in json.loads((sweep / "trials/Command_bs1_seq8/spec.json").read_text())["environment"]
    (result,) = read_results(sweep).values()
    assert result.environment["cpu"], "the supervisor says where it ran"


def test_more_memory_for_those_that_were_out_of_it(tmp_path):
    command = """python3 -c "x = bytearray({batch_size} * 100 * 2**20)" """
    words = ("sweep", "--command", command, "--batch-size=1,4", "--seq-len=8", "-o", "s", "--memory")
    sweep = tmp_path / "started" / "s"
    run(*words, "250MiB")
    first = read_results(sweep)
    assert first["Command_bs1_seq8"].outcome == "ok"
    assert first["Command_bs4_seq8"].outcome != "ok"
    if first["Command_bs4_seq8"].outcome not in ("oom_host", "oom_device"):
        pytest.skip("this host cannot tell an end for memory")
    code, text = run(*words, "800MiB")
    assert (code, "--only oom" in text) == (2, True)
    assert run(*words, "800MiB", "--only", "oom")[0] == 0
    second = read_results(sweep)
    assert second["Command_bs4_seq8"].outcome == "ok"
    assert second["Command_bs1_seq8"] == first["Command_bs1_seq8"], "what fitted stands"
    assert run(*words, "800MiB")[0] == 0
    assert read_results(sweep) == second, "and nothing is run again"
