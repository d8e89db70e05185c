"""Recorded runs are shown in both languages: no English sentence is left, numbers and JSON are equal."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile

import pytest

from flopwatch.cli import main
from house.goldens.inputs import ARCHIVE
from testbeds.english_left import english_left, texts_of

RUNS = ("by_hand", "doubted", "estimated", "real_ddp", "real_evaluation", "real_nanogpt", "recorded_example",
        "recorded_ranks", "resumed", "traced")  # fmt: skip
FORMS = (("why",), ("report",), ("report", "--html", "-"), ("report", "--md", "-"), ("explain",))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_english_sentence_is_left(inputs, run, monkeypatch, capsys):
    monkeypatch.setenv("FLOPWATCH_LANG", "zh")
    folder = inputs / "runs" / run
    known = {str(folder), folder.name}
    for line in (folder / "training_log.jsonl").read_text("utf-8").splitlines():
        known |= texts_of(json.loads(line))
    left = {form: english_left(_output(capsys, form[0], folder, *form[1:]), known) for form in FORMS}

    assert {form: words for form, words in left.items() if words} == {}


def _output(capsys, *arguments):
    with contextlib.suppress(SystemExit):  # `why` of a run without times is an error, which is English
        main([str(each) for each in arguments])
    return capsys.readouterr().out


def test_an_english_sentence_would_be_noticed():
    assert english_left("墙钟时间 2 min，其中 the loader cannot keep up。", set()) == ["the loader cannot keep up"]
    assert english_left("下一步：`flopwatch peak`，flopwatch why runs/a；标称 of a log", {"of a log"}) == []


def _numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*\d|\d", text))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["real_nanogpt", "traced"])
def test_numbers_exit_codes_and_json_are_the_same_in_both_languages(inputs, run):
    for form in (*FORMS[:2], ("compare", inputs / "runs" / "slower"), ("why", "--json"), ("report", "--json", "-")):
        english, chinese = (_run(language, form[0], inputs / "runs" / run, *form[1:]) for language in ("en", "zh"))
        assert english.returncode == chinese.returncode
        if "--json" in form:
            assert english.stdout == chinese.stdout
        else:
            assert english.stdout != chinese.stdout
            assert _numbers(english.stdout) == _numbers(chinese.stdout)


def _run(language: str, *arguments) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "FLOPWATCH_LANG": language, "COLUMNS": "5000"}
    command = [sys.executable, "-m", "flopwatch", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
