"""`flopwatch run script.py` ends, reads, writes and is stopped as `python script.py`.

Each case runs in new processes. Where a case does not need a training, the script does not import torch, which takes
most of the time.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAINING = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        {after_20_steps}
"""


def command(way, *script, options=()):
    return (
        [sys.executable, *script] if way == "python" else [sys.executable, "-m", "flopwatch", "run", *options, *script]
    )


def both_ways(folder, *script, text="", environment=None, options=()):
    """Return code, stdout and stderr of the script without and with `flopwatch run`."""
    ends = []
    for way in ("python", "flopwatch run"):
        done = subprocess.run(
            command(way, *script, options=options),
            input=text,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )
        ends.append((done.returncode, done.stdout, done.stderr))
    return ends


def own_lines_removed(stderr):
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("flopwatch: "))


@pytest.mark.parametrize(
    "source",
    [
        "import sys; print(1, flush=True); sys.exit(3)",
        "import sys; print(1); sys.exit('the data is missing')",
        "import sys; print(sys.stdin.read().upper(), input.__name__)",
        "import sys; print(sys.argv, __name__, __file__, sys.path[0])",
        "def wrong():\n    raise ValueError('wrong')\n\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    wrong()\n",
        "import sys\nsys.excepthook = lambda *error: print('own hook', error[0].__name__)\n1 / 0\n",
        "for x in range(3)\n    pass\n",
        "import os; os._exit(7)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at exit'); raise KeyboardInterrupt",
        "import runpy; runpy.run_path('other.py')",
    ],
    ids=lambda source: source.splitlines()[-1],
)
def test_a_script_without_torch_ends_and_prints_as_with_python(source, tmp_path):
    (tmp_path / "script.py").write_text(source)
    (tmp_path / "other.py").write_text("import nothing_of_this_name")
    arguments = ("--log-every", "5", "-m", "--quiet", "a b")
    plain, watched = both_ways(tmp_path, "script.py", *arguments, text="some text\n")
    assert watched[:2] == plain[:2]
    assert own_lines_removed(watched[2]) == plain[2]
    assert not (tmp_path / "flopwatch-runs").exists()


def test_a_module_and_a_path_from_another_folder_run_as_with_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("WORD = 'beside'")
    show = (
        "import os, sys; print(sys.argv, __name__, __package__, __spec__ and __spec__.name, os.getcwd(), sys.path[0])"
    )
    (package / "module.py").write_text(f"from .beside import WORD\n{show}\nprint(WORD)\nraise ValueError\n")
    (package / "script.py").write_text(f"from beside import WORD\n{show}\nprint(WORD, __file__)\nraise ValueError\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder, script in ((tmp_path, ("-m", "package.module", "--x")), (elsewhere, ("../package/script.py", "y"))):
        plain, watched = both_ways(folder, *script)
        assert plain[0] == 1
        assert "beside" in plain[1]
        assert watched[:2] == plain[:2]
        shown = watched[2]
        assert own_lines_removed(shown).splitlines()[-3:] == plain[2].splitlines()[-3:]
        assert "flopwatch/" not in own_lines_removed(shown)


def test_an_exception_in_a_training_has_the_same_traceback_and_the_log_its_end(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING.format(after_20_steps="raise RuntimeError('out of luck')"))
    plain, watched = both_ways(tmp_path, "train.py", options=("--output-dir", "run", "--quiet"))
    assert plain[0] == 1
    assert "out of luck" in plain[2]
    assert watched == plain
    assert '"total/steps":21' in (tmp_path / "run" / "training_log.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_a_training_as_without(number, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING.format(after_20_steps="print('ready', flush=True)"))
    ends = []
    for way in ("python", "flopwatch run"):
        options = ("--output-dir", "run", "--quiet")
        process = subprocess.Popen(
            command(way, "train.py", options=options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
        ends.append((process.returncode, out, err.splitlines()[-1:]))
    assert ends[0][0] == -number
    assert ends[1] == ends[0]
    assert (tmp_path / "run" / "training_log.jsonl").exists()


def test_workers_threads_and_exit_codes_of_a_training_are_as_without(tmp_path):
    """One script for what needs torch: threads chosen before its import, spawned workers, and an exit code."""
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    plain, watched = both_ways(tmp_path, "train.py", environment={"OMP_NUM_THREADS": "1"}, options=("--quiet",))
    assert plain[0] == 4, plain[2]
    assert "2 threads" in plain[1]
    assert watched == plain
    (folder,) = (tmp_path / "flopwatch-runs").iterdir()
    log = (folder / "training_log.jsonl").read_text()
    assert '"total/steps":10' in log
    assert '"ended_by":"exit status 4"' in log


WITH_WORKERS = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "2"
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(40, 8))
    for (batch,) in DataLoader(rows, 4, num_workers=1, multiprocessing_context="spawn"):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{torch.get_num_threads()} threads, {model.weight.sum().item()!r}")
    sys.exit(4)
"""


def test_nothing_happens_with_FLOPWATCH_DISABLE(tmp_path):  # noqa: N802
    (tmp_path / "train.py").write_text(TRAINING.format(after_20_steps="print(model.weight.sum().item()); break"))
    plain, watched = both_ways(tmp_path, "train.py", environment={"FLOPWATCH_DISABLE": "1"})
    assert plain[0] == 0
    assert watched == plain
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_watch_at_the_top_of_a_script_measures_it(tmp_path):
    ends = TRAINING.format(after_20_steps="print(model.weight.sum().item()); break")
    (tmp_path / "train.py").write_text(ends)
    (tmp_path / "watched.py").write_text("import flopwatch\nflopwatch.watch('run')\n" + ends)
    plain, watched = (
        subprocess.run([sys.executable, name], capture_output=True, text=True, cwd=tmp_path)
        for name in ("train.py", "watched.py")
    )
    assert (watched.returncode, watched.stdout) == (0, plain.stdout)
    assert '"total/steps":21' in (tmp_path / "run" / "training_log.jsonl").read_text()
    assert "MFU" in watched.stderr
    assert str(Path("run")) in watched.stderr
