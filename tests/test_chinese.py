"""Chinese is complete, follows the glossary, says the same numbers as English, and is never out of date unnoticed."""

import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from flopwatch import TrainingMonitor, translations
from flopwatch.language import language, shown
from flopwatch.translations import translated
from support.chinese_pages import CHINESE, ENGLISH_ONLY, PAGES, STATE, fingerprint, outline
from support.texts import TABLE, texts

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "pages" / "recorded"
_HOLE = re.compile(r"\{\d+\}")


def table() -> dict[str, str | None]:
    content = json.loads(TABLE.read_text("utf-8").replace("!}", "}"))
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
        ({"FLOPWATCH_LANG": "nonsense", "LANG": "zh_CN.UTF-8"}, "en"),
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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("encoding", "expected"), [("ascii", "en"), ("latin-1", "en"), ("utf-8", "zh"), ("gb18030", "zh"), (None, "zh")]
)
def test_where_the_output_cannot_have_chinese_it_is_english(
    stream: str, encoding: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPWATCH_LANG", "zh")
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(io.BytesIO(), encoding) if encoding else io.StringIO())

    assert language() == expected


def test_a_stream_without_a_buffer_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_LANG", "zh")
    detached = io.TextIOWrapper(io.BytesIO(), "utf-8")
    detached.detach()
    for stream in (detached, None):
        monkeypatch.setattr(sys, "stdout", stream)
        shown("12 trials")


@pytest.fixture
def fresh_table() -> Iterator[None]:
    def forget() -> None:
        translations._table.cache_clear()
        translations._of_text.cache_clear()

    forget()
    yield
    forget()


DAMAGED = ["", "{", "[]", "null", "{}", '{"texts": {}}', '{"texts": [], "words": 3, "headings": null}', "[" * 100_000]
DAMAGED += [json.dumps({"texts": {"{0} trials": own}, "words": {}, "headings": {}}) for own in (3, "{7} 个", ["个"])]


@pytest.mark.usefixtures("fresh_table")
@pytest.mark.parametrize("content", [None, *map(str.encode, DAMAGED), b"\xff\xfe\x00"])
def test_with_a_damaged_table_everything_is_english(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOPWATCH_LANG", "zh")
    monkeypatch.setattr(translations, "_FILE", tmp_path / "zh.json")
    if content is not None:
        (tmp_path / "zh.json").write_bytes(content)

    assert shown("12 trials") == "12 trials"
    assert shown("The run ended.\n3 of 4 steps") == "The run ended.\n3 of 4 steps"


def test_an_error_in_translating_reaches_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_LANG", "zh")
    monkeypatch.setattr(translations, "_of_text", lambda text: 1 / 0)

    assert shown("12 trials") == "12 trials"


SENTENCES = {english: own for english, own in table().items() if own and _HOLE.search(english)}
HOSTILE = ["runs/x{}", "a b {}", "{{0}} {}", "({}", "{})", "'q{}'", '"n{}: y"', "训练{}", "\x1b[31m{}\x1b[0m", "l\nb{}"]
HOSTILE += [
    "p; q{}",
    "p, q{}",
    "s. T{}.",
    "...{}",
    "more... {}",
    " {} ",
    "step {} failed",
    "`c{}`",
    "\udc80{}",
    "1 of {}",
]


def rendered(english: str, values: dict[str, str]) -> str:
    return _HOLE.sub(lambda hole: values[hole[0]], english)


def values_of(english: str, own: str, take: "random.Random") -> dict[str, str]:
    """Numbers that are in no text, and words where Chinese leaves out a plural or a verb. Of adjacent holes, one."""
    values = {hole: f"{take.randrange(10, 999)},{take.randrange(100, 999)}" for hole in _HOLE.findall(english)}
    values |= {hole: take.choice(["s", "are", "has"]) for hole in values if hole not in own}
    return values | {hole: "" for hole in values if f"}}{hole}" in english}


def bare(text: str) -> str:
    return re.sub(r"\s", "", text).rstrip(".:;?。：；？")


def numbers_of(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*\d|\d", text.replace("为 100 %", "为")))  # MFU is a share


def test_every_value_stands_in_its_hole() -> None:
    take, wrong = random.Random(29), {}
    for english, own in SENTENCES.items():
        values = values_of(english, own, take)
        text = rendered(english, values)
        if (said := bare(translated(text))) != bare(rendered(own, values)) and english != '"{0}"':
            wrong[text] = said

    assert wrong == {}


def a_hostile_text(take: random.Random, depth: int = 0) -> str:
    """A sentence, or two, whose values are numbers, names like those of an attacker, and other sentences."""
    english = take.choice([*SENTENCES])
    values = {hole: a_hostile_value(take, depth) for hole in _HOLE.findall(english)}
    both = take.choice([". ", "; ", ": ", "\n", ", ", " "]) if depth == 0 and take.random() < 0.3 else None
    return rendered(english, values) + (both + a_hostile_text(take, 1) if both else "")


def a_hostile_value(take: random.Random, depth: int) -> str:
    if depth < 2 and take.random() < 0.15:
        return a_hostile_text(take, depth + 1)
    number = f"{take.randrange(10**4, 10**9):,}"
    return number if take.random() < 0.4 else take.choice(HOSTILE).format(number)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hostile_values_keep_every_number(seed: int) -> None:
    take = random.Random(seed)
    texts = [a_hostile_text(take) for _ in range(100)]

    assert {text: translated(text) for text in texts if numbers_of(translated(text)) != numbers_of(text)} == {}


def test_where_a_text_can_be_divided_in_two_ways_no_value_changes_its_place() -> None:
    """In `{0} of {1} trials`, a name of a folder may have ` of ` too."""
    wrong = {}
    for english, own in SENTENCES.items():
        first, second, *_ = [*_HOLE.findall(english), "", ""]
        between = english.partition(first)[2].partition(second)[0] if second else ""
        if between.strip() and own.find(first) > own.find(second) >= 0:
            values = {hole: f"m{place}" for place, hole in enumerate(_HOLE.findall(english), 3)}
            values[first] = f"m1{between}m2"
            text, right = rendered(english, values), rendered(own, values)
            markers = re.findall(r"m\d", said := translated(text))
            if markers not in (re.findall(r"m\d", text), re.findall(r"m\d", right)):
                wrong[text] = said

    assert wrong == {}


def test_values_that_stood_apart_are_not_one_number() -> None:
    assert translations._filled("没有 {1}{0}", {0: "68.1 ms", 1: "47"}) == "没有 47 68.1 ms"


def test_no_sentence_is_lost_behind_an_ellipsis() -> None:
    assert (
        translated("a, b and more... 12 trials. 13 trials. 14 trials")
        == "a, b and more... 12 trials。13 个 trial。14 个 trial"
    )


def test_a_name_stays_as_it_is() -> None:
    assert translated("Why the MFU of padding is 13.8 %") == "为什么 padding 的 MFU 是 13.8 %"
    assert translated("12 trials, 3 to run in optimizer").endswith("目录 optimizer")
    text = "cannot read the matrix evaluation: Permission denied; name a YAML file"
    assert translated(text).startswith("无法读取矩阵 evaluation：")


def test_chinese_leaves_out_words_of_grammar_only() -> None:
    assert translated("3 smaller losses") == "3 个较小的损失项"
    assert "82740" in translated("3 smaller loss82740")


ENDLESS = [
    "steps; ",
    "trial: ",
    "a b, ",
    " s, in ",
    ": ",
    "(; ",
    " (a",
    ". ",
    "step\n",
    "...",
    "A b. ",
    " to ",
    ".",
    "{0} ",
]


@pytest.mark.parametrize("unit", ENDLESS)
def test_reading_a_hostile_text_costs_little_more_than_reading_the_table(unit: str) -> None:
    began = time.process_time()
    translations._table.__wrapped__()
    table_took = time.process_time() - began
    for begin, end in (("", ""), ("no progress for ", "x"), ("", "x to ,")):
        text = begin + unit * ((3990 - len(begin + end)) // len(unit)) + end
        for letters in (400, 4000):
            began = time.process_time()
            translated(text[: letters - 7] + end)
            assert time.process_time() - began < 20 * table_took


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
