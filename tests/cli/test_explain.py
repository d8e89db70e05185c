"""`flopwatch explain`: what it prints can be checked with a pocket calculator, and is what the run logged."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal

import pytest

from flopwatch.records.run import Provenance, RunStart
from support.make_run_log import PEAK, Accounts, Story, session, write_log, write_run

LOG = "training_log.jsonl"


def rows_in(path):
    """Straight from the file, without our reader."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


def number(text):
    return Decimal(text.replace(",", ""))


def divisions(out):
    """Name to (numerator, denominator factors, result) of the divisions that are written out in full."""
    found = {}
    for name, block in re.findall(r"^  (MFU|HFU) = (.*?)(?:\n\n|\Z)", out, re.MULTILINE | re.DOTALL):
        written = re.search(r"= ([\d,]+) / \(([^)]+)\)", block)
        result = re.findall(r"^      = ([\d.e+-]+)$", block, re.MULTILINE)[-1]
        found[name] = (number(written[1]), [number(factor) for factor in written[2].split(" x ")], Decimal(result))
        assert is_close(quotient(found[name]), result), "the division as written gives the result as printed"
    return found


def quotient(division):
    flops, factors, _ = division
    for factor in factors:
        flops /= factor
    return flops


def is_close(a, b, digits=6):
    return abs(Decimal(a) / Decimal(b) - 1) < Decimal(10) ** -(digits - 1)


def test_the_newest_window_divides_to_what_the_run_logged(flopwatch, tmp_path):
    path = write_run(tmp_path, 2000)
    status, out, err = flopwatch("explain", str(tmp_path))
    assert (status, err) == (0, "")

    row = rows_in(path)[-1]
    columns = row["steps"]
    mfu, hfu = divisions(out)["MFU"], divisions(out)["HFU"]
    assert mfu[0] == sum(columns["model_flops"])
    assert hfu[0] == sum(columns["hardware_flops"])
    assert is_close(mfu[1][0], sum(columns["seconds"]), 12)
    assert mfu[1][1] == Decimal(PEAK["flops_per_s"])
    for division, key in ((mfu, "perf/mfu"), (hfu, "perf/hfu")):
        assert is_close(division[2], row["values"][key])
    assert out.count("The log has the same value") == 2
    assert f"MFU {100 * row['values']['perf/mfu']:.2f} %, HFU {100 * row['values']['perf/hfu']:.2f} %" in out


def test_the_short_division_gives_the_same_on_a_calculator_of_nine_digits(flopwatch, tmp_path):
    write_run(tmp_path, 50)
    _, out, _ = flopwatch("explain", str(tmp_path), "--step", "33")
    shorts = re.findall(r"= ([\d.]+) / \(([\d.]+) x ([\d.]+)\) in TFLOP", out)
    for (flops, seconds, peak), name in zip(shorts, ("MFU", "HFU"), strict=True):
        assert is_close(Decimal(flops) / Decimal(seconds) / Decimal(peak), divisions(out)[name][2])


def test_one_step_divides_by_its_own_cells(flopwatch, tmp_path):
    path = write_run(tmp_path, 100)
    status, out, _ = flopwatch("explain", str(tmp_path), "--step", "57")
    assert status == 0
    columns = rows_in(path)[5]["steps"]
    index = columns["step"].index(57)
    flops, (seconds, peak), result = divisions(out)["MFU"]
    assert (flops, peak) == (columns["model_flops"][index], Decimal(PEAK["flops_per_s"]))
    assert float(seconds) == columns["seconds"][index]
    assert is_close(result, columns["model_flops"][index] / columns["seconds"][index] / PEAK["flops_per_s"])
    assert "in the logging window of steps 51 to 60" in out


@pytest.mark.parametrize("peak", [{"flops_per_s": 1e12}, {**PEAK, "fraction": None}], ids=["no words", "no fraction"])
def test_a_damaged_peak_is_explained_as_far_as_it_is_known(flopwatch, tmp_path, peak):
    records = list(session(Story(), 1, 100, Accounts()))
    (tmp_path / "a").mkdir()
    damaged = [replace(each, peak=peak) if isinstance(each, Provenance) else each for each in records]
    write_log(tmp_path / "a" / "training_log.jsonl", damaged)
    status, out, err = flopwatch("explain", str(tmp_path / "a"))
    assert (status, err) == (0, "")
    assert f"{peak['flops_per_s']:,.0f} FLOP/s, {peak.get('device', 'unknown')}" in out
    assert flopwatch("watch", str(tmp_path / "a"), "--once")[0] == 0


def test_json_has_null_and_not_nan(flopwatch, tmp_path):
    records = list(session(Story(), 1, 100, Accounts()))
    (tmp_path / "a").mkdir()
    steps = dict(records[-1].steps)
    steps["hardware_flops"] = [float("nan")] * len(steps["step"])
    log = write_log(tmp_path / "a" / "training_log.jsonl", records[:-1])
    with log.open("a") as file:
        file.write(json.dumps({**records[-1].to_json(), "steps": steps}) + "\n")
    for command in (["explain", str(log), "--json"], ["compare", str(log), str(log), "--json"]):
        status, out, _ = flopwatch(*command)
        assert status == 0
        assert "null" in out
        assert "NaN" not in out


def test_a_logged_value_that_does_not_follow_from_the_steps_is_pointed_out(flopwatch, tmp_path):
    path = write_run(tmp_path, 50)
    lines = path.read_text().splitlines()
    row = json.loads(lines[-1])
    row["values"]["perf/mfu"] *= 1.1
    path.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    assert "which differs by +10.00%" in flopwatch("explain", str(tmp_path))[1]


def test_seconds_rounded_to_nanoseconds_still_give_the_same(flopwatch, tmp_path):
    path = write_run(tmp_path, 50)
    lines = path.read_text().splitlines()
    row = json.loads(lines[-1])
    exact = [seconds / 1000 for seconds in row["steps"]["seconds"]]
    row["values"]["perf/mfu"] = sum(row["steps"]["model_flops"]) / sum(exact) / PEAK["flops_per_s"]
    row["steps"]["seconds"] = [round(seconds, 9) for seconds in exact]
    path.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    _, out, _ = flopwatch("explain", str(tmp_path))
    assert "The log has the same value" in out.partition("HFU =")[0]
    assert "This is more than the peak, so the peak, the FLOPs or the time is wrong." in out


def test_a_step_that_was_run_again_is_explained_as_it_ran_last(flopwatch, tmp_path):
    accounts = Accounts()
    path = write_log(tmp_path / LOG, session(Story(), 1, 60, accounts))
    write_log(path, session(Story(seed=1), 31, 60, accounts, 30), append=True)
    _, out, _ = flopwatch("explain", str(tmp_path), "--step", "45")
    again = [row for row in rows_in(path) if row["step"] == 50][1]
    assert divisions(out)["MFU"][0] == again["steps"]["model_flops"][4]
    assert "session 2 of 2" in out


def test_the_session_named_is_the_one_whose_steps_count(flopwatch, tmp_path):
    accounts = Accounts()
    path = write_log(tmp_path / LOG, session(Story(), 1, 40, accounts))
    write_log(path, session(Story(), 31, 60, accounts, 30), append=True)
    write_log(path, session(Story(), 21, 60, accounts, 20), append=True)
    for step, number in ((15, 1), (25, 3), (45, 3)):
        assert f"session {number} of 3" in flopwatch("explain", str(tmp_path), "--step", str(step))[1]


def test_a_window_run_again_in_part_is_summed_over_what_is_left(flopwatch, tmp_path):
    path = write_log(tmp_path / LOG, session(Story(), 1, 60, Accounts()))
    write_log(path, [RunStart("again", 0.0, "out", resumed_after_step=54)], append=True)
    _, out, _ = flopwatch("explain", str(tmp_path))
    assert "Steps 51 to 54 (all 4 are used" in out
    assert divisions(out)["MFU"][0] == sum(rows_in(path)[-1]["steps"]["model_flops"][:4])


@pytest.mark.slow
def test_a_real_run_is_explained_to_what_it_logged(flopwatch, tmp_path):
    import torch

    from flopwatch import TrainingMonitor

    model = torch.nn.Linear(64, 32)
    sizes = [1 + 7 * step % 40 for step in range(35)]
    with TrainingMonitor(str(tmp_path), model=model, log_every=5, peak_flops_per_s=1e12) as monitor:
        for step, size in enumerate(sizes, start=1):
            batch = torch.randn(size, 64)
            loss = model(batch).square().mean()
            loss.backward()
            monitor.log_step(step, loss=loss, batch=batch)

    _, out, _ = flopwatch("explain", str(tmp_path), "--step", "33")
    # 2 x 64 x 32 FLOPs forward, as many for the weights' gradient; the inputs need none.
    assert divisions(out)["MFU"][0] == sizes[32] * 2 * (2 * 64 * 32)

    _, out, _ = flopwatch("explain", str(tmp_path))
    assert divisions(out)["MFU"][0] == sum(sizes[30:35]) * 2 * (2 * 64 * 32)
    assert "The log has the same value" in out.partition("HFU =")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "51"], "step 51 is not in .*: the log has steps 1 to 50"),
        (["--step", "0"], "step 0 is not in .*: the log has steps 1 to 50"),
    ],
)
def test_a_step_that_is_not_in_the_log_ends_with_status_2_and_those_that_are(flopwatch, tmp_path, arguments, message):
    write_run(tmp_path, 50)
    status, out, err = flopwatch("explain", str(tmp_path), *arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err)


def test_as_a_process_a_folder_without_a_log_ends_with_status_2_and_a_message(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flopwatch", "explain", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no training_log.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
