"""Every command and every matrix on the page of the sweep works as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from flopwatch.records.sweep_results import read_results
from flopwatch.sweep.spec.matrix import expand, read_matrix
from support.warm_sweep import flopwatch_warm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs/sweep.md",
    *ROOT.glob("README*.md"),
    *sorted({*ROOT.glob("docs/**/*.md")} - {ROOT / "docs/sweep.md"}),
]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language, pages=PAGES):
    return [text for page in pages for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands():
    lines = {line for block in blocks("bash") for line in block.splitlines()}
    return sorted(line for line in lines if line.startswith(("flopwatch sweep", "flopwatch trial", "flopwatch fit")))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    return tmp_path


def run(line, *more):
    program, *words = shlex.split(line)
    assert program == "flopwatch"
    return flopwatch_warm(*words, *more, COLUMNS="100")


def _write_modules(place):
    """The page's own model and batch, in a file beside the user."""
    (code,) = [text for text in blocks("python", PAGES[:1]) if "pictures.py" in text]
    (place / "pictures.py").write_text(code)


SWEEPS = [line for line in commands() if line.startswith("flopwatch sweep")]


@pytest.mark.parametrize("line", SWEEPS)
def test_every_sweep_on_the_page_has_a_matrix(place, line):
    """Dry, so that the page may name real sizes and engines; commands cost nothing and run."""
    _write_modules(place)
    done = run(line) if "--command" in line else run(line, "--dry-run")
    assert done.returncode == 0, done.stderr
    if "--command" in line:
        results = read_results(place / "flopwatch-sweep").values()
        assert {result.outcome for result in results} == {"ok"}
        assert {result.measured.samples_per_s for result in results} == {3.0}


def test_the_matrices_on_the_page_can_be_read(place):
    matrix, processes = blocks("yaml", PAGES[:1])
    (place / "processes.yaml").write_text(processes)
    assert {(spec.gpus, spec.processes) for spec in expand(read_matrix(place / "processes.yaml", {}))} == {(8, 8)}
    (place / "sweep.yaml").write_text(matrix)
    specs = expand(read_matrix(place / "sweep.yaml", {}))
    assert {spec.label for spec in specs} == {"StandardTrainer", "DPGhostClippingTrainer", "mine", "script"}
    assert not [spec for spec in specs if spec.trainer == "ghost" and spec.seq_len >= 1024]
    assert not [spec for spec in specs if spec.trainer == "standard" and spec.checkpointing]


@pytest.mark.requirement("R23", "R27")
def test_the_pages_own_trainer_and_a_quick_sweep(place):
    """The class on the page, in a file beside the user, next to a built-in one."""
    (code,) = [text for text in blocks("python", PAGES[:1]) if "class Plain" in text]
    (place / "mine.py").write_text(code)
    done = run("flopwatch sweep --quick --trainer standard,mine:Plain trace=false")
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "flopwatch-quick").rename(place / "flopwatch-sweep")  # for the reports on the page
    results = read_results(place / "flopwatch-sweep")
    assert {name: result.outcome for name, result in results.items()} == {
        "StandardTrainer_bs2_seq64": "ok",
        "Plain_bs2_seq64": "ok",
    }
    costs = {result.measured.cost.model_flops for result in results.values()}
    assert len(costs) == 1, "the model's FLOPs are those of the standard step, whoever trains"
    for line in blocks("bash", PAGES[:1])[0].splitlines():
        if line.startswith("flopwatch report"):
            assert run(line).returncode == 0
    assert (place / "report.html").exists()


def test_the_pages_own_batch_is_swept_as_the_page_says(place):
    _write_modules(place)
    (line,) = [line for line in commands() if "pictures:images" in line]
    done = run(line, "--steps=1", "warmup_steps=1", "trace=false")
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_results(place / "flopwatch-sweep").values()
    assert [result.outcome for result in results] == ["ok", "ok"]
    assert {result.measured.tokens_per_s for result in results} == {None}


@pytest.mark.parametrize(
    "line", dict.fromkeys(line for line in commands() if line.startswith(("flopwatch trial", "flopwatch fit")))
)
def test_a_trial_and_a_fit_of_the_page_take_these_flags(place, line):
    """With the smallest model and the quickest accountant, lest the test take minutes."""
    smaller = ["--model-size", "tiny", "--seq-len", "32", "--steps", "1"]
    smaller += ["--max-batch", "4"] if " fit " in line else []
    smaller += ["privacy.accountant=rdp"] if " privacy." in line else []
    done = run(line, *smaller)
    assert done.returncode == 0, done.stdout + done.stderr
