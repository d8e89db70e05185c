"""A run whose device has no known peak: all commands show its times, and take the peak afterwards."""

import csv
import json
import os
import re
import textwrap

import pytest

from support.torchrun import outputs_of_ranks

PEAK_TFLOPS = 0.05
TRAINING = """
import sys, torch
from flopwatch import TrainingMonitor

folder, peak, ranks = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
if ranks > 1:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
with TrainingMonitor(folder, model=model, log_every=10, peak_flops_per_s=peak * 1e12 or None, dtype="fp8") as monitor:
    for number, batch in enumerate(monitor.batches(torch.randn(60, 8, 64))):
        with monitor.step(batch):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 30:
            with monitor.phase("eval"):
                model(batch)
if ranks > 1:
    torch.distributed.destroy_process_group()
"""
"""No device has a known peak for fp8 on a CPU."""

COMMANDS = {
    "why": ("why", "{run}"),
    "why as JSON": ("why", "{run}", "--json"),
    "report": ("report", "{run}"),
    "report as JSON": ("report", "{run}", "--json"),
    "report as Markdown": ("report", "{run}", "--md", "{file}"),
    "report as a page": ("report", "{run}", "--html", "{file}"),
    "report as CSV": ("report", "{run}", "--csv", "{file}"),
    "explain": ("explain", "{run}"),
    "explain as JSON": ("explain", "{run}", "--json"),
    "compare": ("compare", "{run}", "{run}"),
    "compare as JSON": ("compare", "{run}", "{run}", "--json"),
    "watch": ("watch", "{run}", "--once"),
}


def train(folder, peak_tflops, ranks=1):
    outputs_of_ranks(textwrap.dedent(TRAINING), str(folder), str(peak_tflops), str(ranks), ranks=ranks)
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def logs(request, tmp_path_factory):
    """The folder of a run with a peak, and another with the same rows as a run without a peak writes them."""
    os.environ.pop("FLOPWATCH_PEAK_TFLOPS", None)
    folder = tmp_path_factory.mktemp("runs")
    with_peak = train(folder / "knew/run", PEAK_TFLOPS, request.param)
    really_without = train(folder / "other", 0, request.param)
    stripped = [without_peak(record) for record in with_peak]
    (folder / "given/run").mkdir(parents=True)
    for name, records in (("knew/run", with_peak), ("given/run", stripped)):
        text = "".join(json.dumps(record) + "\n" for record in records if record["type"] != "notice")
        (folder / name / "training_log.jsonl").write_text(text)
    assert really_without == [without_peak(record) for record in really_without]  # nothing else needs to be removed
    return folder


def without_peak(record):
    """The record without what a run can only know with a peak."""
    of_peak = ("perf/mfu", "perf/hfu", "perf/peak_flops", "time/model_at", "time/hardware_at", "time/recompute_at")
    record = json.loads(json.dumps(record))
    if "values" in record:
        record["values"] = {k: v for k, v in record["values"].items() if not k.startswith(of_peak)}
    if "seconds" in record.get("ledger", {}):
        seconds = record["ledger"]["seconds"]
        record["ledger"]["seconds"] = {k: v for k, v in seconds.items() if not k.endswith("_at_peak")}
    return {**record, "peak": None} if "peak" in record else record


@pytest.fixture
def output_of(flopwatch, tmp_path, monkeypatch):
    """A function that runs one of the commands and returns what it wrote."""

    def output(folder, command, *more):
        monkeypatch.chdir(folder.parent)
        file = tmp_path / "written"
        arguments = [part.format(run=folder.name, file=file) for part in COMMANDS[command]]
        status, out, err = flopwatch(*arguments, *more)
        assert status == 0, err
        return file.read_text() if file.exists() else out

    return output


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_with_a_peak_given_afterwards_every_output_is_that_of_a_run_that_knew_it(logs, output_of, command):
    knew_it = output_of(logs / "knew/run", command)
    given = output_of(logs / "given/run", command, "--peak-tflops", str(PEAK_TFLOPS))
    if command.endswith("JSON"):
        assert leaves(json.loads(given)) == leaves(json.loads(knew_it))
    elif command.endswith("CSV"):
        assert table(given) == table(knew_it)
    else:
        assert without_dots(given) == without_dots(knew_it)


def without_dots(text):
    """The text without the dots of curves, which the rounding of the last digit can move, also beyond a line's end.

    Without what the log itself has, too, which `explain` says after each division.
    """
    text = re.sub(r"\nThe log has [^\n]*", "", text)
    return re.sub("[ \u2800-\u28ff]+$", "", re.sub("[\u2800-\u28ff]", " ", text), flags=re.MULTILINE)


def leaves(value, path=""):
    """Every value by its path, rounded to 9 digits, without what `explain` says about the logged MFU."""
    if isinstance(value, dict):
        told = {name: item for name, item in value.items() if name not in ("logged", "peak_was_logged")}
        return {k: v for name, item in told.items() for k, v in leaves(item, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, f"{path}/{i}").items()}
    return {path: float(f"{value:.9g}") if isinstance(value, float) else value}


def table(text):
    """The rows of a CSV file, with the cells by column."""
    return [
        {name: float(f"{float(cell):.9g}") if cell not in ("", "True", "False") else cell for name, cell in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_works_without_a_peak(logs, output_of, command):
    assert output_of(logs / "given/run", command)


def test_the_times_add_up_to_the_wall_time(logs, output_of):
    found = json.loads(output_of(logs / "given/run", "why as JSON"))
    assert sum(use["seconds"] for use in found["uses"]) == pytest.approx(found["wall_seconds"])
    assert found["mfu_percent"] is None
    in_steps = {use["key"]: use["seconds_per_step"] for use in found["uses"]}
    assert in_steps["optimizer"] > 0
    assert in_steps["eval"] is None
    assert found["flops_per_second"] > 0
    assert "--peak-tflops" in found["no_verdict"]


def test_a_peak_that_is_no_positive_number_is_refused(logs, flopwatch):
    status, _, err = flopwatch("why", str(logs / "given/run"), "--peak-tflops", "0")
    assert status == 2
    assert "--peak-tflops must be a positive number" in err
