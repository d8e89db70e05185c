"""Chinese is complete, follows the glossary, says the same numbers as English, and is never out of date unnoticed."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

from flopwatch import TrainingMonitor
from flopwatch.language import language, shown
from flopwatch.translations import translated
from support.chinese_pages import CHINESE, ENGLISH_ONLY, PAGES, STATE, fingerprint, outline
from support.texts import TABLE, texts

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "pages" / "recorded"
_HOLE = re.compile(r"\{\d+\}")


def table() -> dict[str, str | None]:
    content = json.loads(TABLE.read_text("utf-8"))
    return {**content["texts"], **content["words"], **content["headings"]}


def test_every_sentence_of_the_source_has_chinese() -> None:
    known = json.loads(TABLE.read_text("utf-8"))["texts"]
    missing = {text: file for text, file in texts().items() if known.get(text, "") == ""}

    assert missing == {}, "run `python -m support.texts` in tests/, and translate the new texts in zh.json"
    assert known.keys() - texts().keys() == set(), "no longer in the source: run `python -m support.texts` in tests/"


def test_a_new_english_sentence_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('def f(count):\n    return f"All {count:,} of these are new."\n')

    assert texts(tmp_path) == {"All {0} of these are new.": "new.py"}
    assert "All {0} of these are new." not in table()


def test_a_translation_has_the_values_of_the_english_once_each_or_leaves_one_out() -> None:
    """Left out are plurals and verbs, such as `{0} trial{1}`."""
    holes = {english: (_HOLE.findall(english), _HOLE.findall(own)) for english, own in table().items() if own}

    assert {english for english, (theirs, own) in holes.items() if not set(own) <= set(theirs)} == set()
    assert {english for english, (_, own) in holes.items() if len(own) > len(set(own))} == set()


def forbidden() -> list[tuple[str, str]]:
    rows = [line.split("|") for line in (ROOT / "docs/glossary.md").read_text("utf-8").splitlines()]
    words = [(cells[1].strip(), word.strip()) for cells in rows if len(cells) == 6 for word in cells[4].split("、")]
    return [(english, word) for english, word in words if word and word != "不写" and not word.startswith("-")]


def test_the_glossary_forbids_words() -> None:
    assert ("step time", "步长") in forbidden()
    assert len(forbidden()) > 40


@pytest.mark.parametrize("page", [*(CHINESE / page for page in PAGES), ROOT / "README.zh-CN.md", TABLE], ids=str)
def test_no_word_that_the_glossary_forbids_is_written(page: Path) -> None:
    text = "\n".join(filter(None, table().values())) if page == TABLE else page.read_text("utf-8")
    found = {word: english for english, word in forbidden() if word in text}

    assert found == {}


def test_every_page_for_users_has_a_chinese_one() -> None:
    english = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    english = {page for page in english if not page.startswith("zh/")} - ENGLISH_ONLY

    assert set(PAGES) == english
    assert {page for page in PAGES if not (CHINESE / page).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_has_the_headings_code_pictures_and_tables_of_the_english_one(page: str) -> None:
    assert outline(CHINESE / page) == outline(ROOT / "docs" / page)


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_changed_since_it_was_translated(page: str) -> None:
    translated_from = json.loads(STATE.read_text("utf-8")).get(page)

    done = f"change docs/zh/{page} too, then run `python -m support.chinese_pages {page}` in tests/"
    assert translated_from == fingerprint(ROOT / "docs" / page), done


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "FLOPWATCH_LANG": "en"}, "en"),
        ({"FLOPWATCH_LANG": "zh"}, "zh"),
    ],
)
def test_the_setting_comes_before_the_locale(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLOPWATCH_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert language() == expected


def test_the_setting_of_a_monitor_comes_before_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOPWATCH_LANG", raising=False)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with TrainingMonitor(tmp_path / "zh", config={"flopwatch": {"language": "zh"}}, quiet=True):
        assert language() == "zh"
    with TrainingMonitor(tmp_path / "en", quiet=True):
        assert language() == "en"


def test_values_stand_where_chinese_wants_them() -> None:
    assert translated("12 of 30 trials already have results, 18 to run") == "30 个 trial 中 12 个已有结果，18 个待运行"


def test_what_the_table_does_not_have_stays_as_it_is() -> None:
    for text in ("/home/me/my model of steps", "RuntimeError: no kernel image is available", "12.5 ms", "", "训练"):
        assert translated(text) == text


def test_english_readers_see_the_text_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_LANG", "en")

    assert shown("12 of 30 trials already have results, 18 to run").startswith("12 of 30")


COMMANDS = [
    "why runs/example",
    "why runs/ranks",
    "explain runs/example",
    "report runs/example",
    "report runs/example --md -",
    "report runs/example --html -",
    "watch runs/example --once",
    "compare runs/example runs/ranks",
    "report flopwatch-sweep",
    "report flopwatch-sweep --md -",
    "report flopwatch-sweep --html -",
    "report flopwatch-sweep --metric memory,time,tokens,samples,mfu,hfu",
    "flops --model tiny",
    'peak --name "NVIDIA H100 80GB HBM3"',
    'peak --name "NVIDIA RTX A1000"',
    "report no-such-folder",
    "sweep --trainers standard --batch-sizes many",
    *(f"{name} --help" for name in ("", "run", "watch", "why", "sweep", "trial", "fit", "report", "compare", "init")),
]


def run(command: str, language: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "flopwatch", *shlex.split(command)],
        cwd=RECORDED,
        env={**os.environ, "FLOPWATCH_LANG": language, "COLUMNS": "200", "TZ": "UTC"},
        capture_output=True,
        text=True,
        check=False,
    )


def numbers(text: str) -> Counter[str]:
    """Counted without the digits inside markup, whose places depend on widths of texts."""
    text = re.sub(r"<(style|script).*?</\1>|<svg.*?</svg>|<[^>]*>|`[^`]*`", " ", text, flags=re.DOTALL)
    return Counter(re.findall(r"\d[\d,.]*\d|\d", unescape(text)))


def test_a_word_in_a_sentence_may_be_the_name_of_a_setting() -> None:
    assert translated("memory") == "内存"
    assert translated("no value for steps; there are wall_seconds, memory").endswith("wall_seconds, memory")


def test_sentences_that_are_one_text_are_found_among_others() -> None:
    english = (
        "OOM: out of memory. OOM*: not run, because a smaller trial ran out of memory. n/a: the trainer does not "
        "support the model. The device has 24.0 GiB."
    )

    assert translated(english).endswith("n/a：训练器不支持这个模型。这台设备有 24.0 GiB。")


def test_the_words_of_an_exception_are_no_number_of_trials() -> None:
    assert translated("OutOfMemoryError: CUDA out of memory") == "OutOfMemoryError: CUDA out of memory"


# Words of two letters and more that are no name, unit, flag, path or key.
_ENGLISH = re.compile(r"(?<![\w/.`$<=:'\"-])[A-Za-z]?[a-z]{2,}(?![\w/`=>-])")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_the_same_numbers_in_both_languages(command: str) -> None:
    english, chinese = (run(command, language) for language in ("en", "zh"))

    assert chinese.returncode == english.returncode
    if command.startswith("watch"):  # its line of losses has as many as fit, and Chinese is shorter
        assert not numbers(english.stdout) - numbers(chinese.stdout)
    else:
        assert numbers(chinese.stdout) == numbers(english.stdout)
    assert re.search("[\u4e00-\u9fff]", chinese.stdout + chinese.stderr)
    assert not re.search("[\u4e00-\u9fff]", english.stdout + english.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["why runs/example --json", "report flopwatch-sweep --json", "peak --json"])
def test_json_does_not_change_with_the_language(command: str) -> None:
    assert run(command, "zh").stdout == run(command, "en").stdout
