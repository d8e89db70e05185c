"""The likeliest mistakes of new users, each made for real, with the message that it gives.

`python -m support.mistakes --update` in `tests/` writes the messages to docs/mistakes.md.
"""

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flopwatch
from flopwatch.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
ROWS, COLUMNS = 3, 80
STEPS = 3
_FILES = {
    "not_yaml.yaml": "trainers: [standard\n",
    "typo.yaml": "trainers: [standard]\nbacth_sizes: [4]\n",
    "train.py": "print('training')\n",
    "mine.py": """
import torch


class NoMethods:
    pass


def net():
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 10))
""",
}


@dataclass(frozen=True, eq=False)
class Mistake:
    """What the user does, and a part of the message that names the mend.

    Attributes:
        written: What the user writes.
        mend: A part of the message, which says what to do.
        options: For a training, the arguments of TrainingMonitor.
        train: For a training, how one is run with these options; None for a command or a call.
        call: A call in Python that raises an error.
        without: Packages that are not installed.
    """

    written: str
    mend: str
    options: Mapping[str, Any] | None = None
    train: "Callable[[Mapping[str, Any]], int] | None" = None
    call: Callable[[], object] | None = None
    without: tuple[str, ...] = ()

    @property
    def is_command(self) -> bool:
        return self.written.startswith("flopwatch ")


def _net() -> torch.nn.Module:
    return torch.nn.Linear(8, 8)


def _train(options: Mapping[str, Any], *, batch: Any = ..., numbers: Any = range(STEPS), loss: Any = ...) -> int:
    """Train a layer with a monitor; returns the steps of the training."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps = 0
    with flopwatch.TrainingMonitor(**{"output_dir": "outputs", "model": net, "quiet": True, **options}) as monitor:
        for number in numbers:
            inputs = torch.ones(4, 8)
            with monitor.step(inputs if batch is ... else batch, step=number) as step:
                value = net(inputs).square().mean()
                value.backward()
                optimizer.step()
                step.log(loss=value if loss is ... else loss)
            steps += 1
    return steps


def _train_longer(options: Mapping[str, Any]) -> int:
    """The first steps are counted, and such steps have no MFU."""
    return _train(options, numbers=range(3 * STEPS)) // 3


def _two_at_once(options: Mapping[str, Any]) -> int:
    net = _net()
    with flopwatch.TrainingMonitor("outputs", model=net, quiet=True) as first:
        first.log_step(0, batch=torch.ones(4, 8))
        first.state_dict()
        return _train(options)


def _training(written: str, mend: str, *, without: tuple[str, ...] = (), run: Any = _train, **options: Any) -> Mistake:
    return Mistake(written, mend, options, run, without=without)


MISTAKES = (
    _training("TrainingMonitor('outputs', model=Linear)", "must be the torch.nn.Module", model=torch.nn.Linear),
    _training("TrainingMonitor('outputs')  # no model", "pass model= to TrainingMonitor", model=None),
    _training("with monitor.step():  # no batch", "pass batch= to step()", run=lambda given: _train(given, batch=None)),
    _training(
        "with monitor.step(['a text', 'another']):",
        "pass what the model is called with",
        run=lambda given: _train(given, batch=["a text", "another"]),
    ),
    _training("step.log(loss=[0.1, 0.2])", "pass loss.detach()", run=lambda given: _train(given, loss=[0.1, 0.2])),
    _training(
        "monitor.log_step(1, ...) for each micro-batch",
        "pass each batch to micro_batch()",
        run=lambda given: _train(given, numbers=(0, 1, 1)),
    ),
    _training(
        "TrainingMonitor('outputs')  # while another run writes there", "an output_dir of its own", run=_two_at_once
    ),
    _training(
        "TrainingMonitor('train.py')  # a file", "pass an output_dir that can be written to", output_dir="train.py"
    ),
    _training("TrainingMonitor(..., mode='smrt')", "'smart', 'estimate'", mode="smrt"),
    _training("TrainingMonitor(..., preset='prod')", "use one of production", preset="prod"),
    _training("TrainingMonitor(..., log_every=0)", "greater than or equal to 1", log_every=0),
    _training("TrainingMonitor(..., attention='casual')", "'full' or 'causal'", attention="casual"),
    _training("TrainingMonitor(..., dtype='bf61')", "use one of fp64", dtype="bf61"),
    _training("TrainingMonitor(..., peak_flops_per_s='312T')", "such as 989.4e12", peak_flops_per_s="312T"),
    _training(
        "TrainingMonitor(..., peak_flops_per_s=312)",
        "peak_flops_per_s=312e12",
        run=_train_longer,
        peak_flops_per_s=312,
    ),
    _training("TrainingMonitor(..., sinks='tensorbord')", "did you mean 'tensorboard'?", sinks="tensorbord"),
    _training(
        "TrainingMonitor(..., sinks='wandb')  # not installed",
        'pip install "flopwatch[wandb]"',
        sinks="wandb",
        without=("wandb",),
    ),
    _training(
        "TrainingMonitor(..., sinks='nowhere:Sink')", "correct the name, or set PYTHONPATH", sinks="nowhere:Sink"
    ),
    _training(
        "TrainingMonitor(..., config={'monitoring': {'log_evry': 10}})",
        "did you mean 'log_every'?",
        config={"monitoring": {"log_evry": 10}},
    ),
    _training("TrainingMonitor(..., config='nothing.yaml')", "correct the path or the file", config="nothing.yaml"),
    _training("TrainingMonitor(..., config='not_yaml.yaml')", "correct the path or the file", config="not_yaml.yaml"),
    Mistake(
        "TrainingMonitor(model)",
        'write TrainingMonitor("outputs", model=model)',
        call=lambda: flopwatch.TrainingMonitor(_net()),  # type: ignore[arg-type]
    ),
    Mistake(
        "flopwatch.count_flops(model, 'a text')",
        "pass what the model is called with",
        call=lambda: flopwatch.count_flops(_net(), "a text"),
    ),
    Mistake("flopwatch run trian.py", "give the path of your training script"),
    Mistake("flopwatch run -m train.py", "write `flopwatch run train.py`"),
    Mistake("flopwatch run --log_every 5 train.py", "Run 'flopwatch run --help'"),
    Mistake("flopwatch run --config nothing.yaml train.py", "`flopwatch init nothing.yaml` writes one"),
    Mistake("flopwatch watch nothing", "pass the output_dir"),
    Mistake("flopwatch watch empty", "pass the output_dir"),
    Mistake("flopwatch watch train.py", "pass the output_dir"),
    Mistake("flopwatch explain run --step 900", "the log has steps 0 to 2"),
    Mistake("flopwatch compare run", "Run 'flopwatch compare --help'"),
    Mistake("flopwatch wacth run", "Did you mean 'watch'?"),
    Mistake("flopwatch watch run --colour", "Run 'flopwatch watch --help'"),
    Mistake("flopwatch peak --name RTX-9999", "Give the name as"),
    Mistake("flopwatch peak --name Tesla-T4 --dtype bf61", "use one of fp64"),
    Mistake("flopwatch flops --model tinny", "did you mean 'tiny'?"),
    Mistake("flopwatch flops --model nothing.json", "correct the path"),
    Mistake("flopwatch flops --model mine:nothing", "correct the name"),
    Mistake("flopwatch report empty", "name the folder that `flopwatch sweep` wrote"),
    Mistake("flopwatch sweep --trainers ghst", "did you mean 'ghost'?"),
    Mistake("flopwatch sweep --trainers nowhere:Mine", "correct the name"),
    Mistake("flopwatch sweep --trainers mine:NoMethods", "a trainer needs"),
    Mistake("flopwatch sweep --models mine:nothing", "there are NoMethods, net"),
    Mistake("flopwatch sweep --batch-sizes 0", "greater than or equal to 1"),
    Mistake("flopwatch sweep --memory 4", "write it as 4GiB"),
    Mistake("flopwatch sweep --exclude trainer=ghst", "did you mean 'ghost'?"),
    Mistake("flopwatch sweep batchsize=4", "did you mean 'batch_size'?"),
    Mistake("flopwatch sweep typo.yaml", "did you mean 'batch_sizes'?"),
    Mistake("flopwatch sweep not_yaml.yaml", "correct it, or name a YAML file"),
    Mistake("flopwatch sweep nothing.yaml", "name a YAML file"),
)


@dataclass(frozen=True)
class Outcome:
    """The texts that the user sees, and the exit status of a command, or the steps that a training made."""

    texts: tuple[str, ...]
    status: int


def make(mistake: Mistake) -> Outcome:
    """Make the mistake in an empty folder with a few files and a run."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, _without(mistake.without):
        os.chdir(folder)
        try:
            _prepare()
            if mistake.train is not None:
                return _made_in_training(mistake)
            return _made_on_command_line(mistake) if mistake.is_command else _made_in_call(mistake)
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _without(packages: tuple[str, ...]) -> Iterator[None]:
    """Inside the block, these packages cannot be imported."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)


def _prepare() -> None:
    for name, text in _FILES.items():
        Path(name).write_text(text)
    Path("empty").mkdir()
    with _messages(), flopwatch.TrainingMonitor("run") as monitor:
        for number in range(STEPS):
            monitor.log_step(number, batch=torch.ones(4, 8))


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """The messages that the monitor logs at the level of a warning or above, which Python prints to stderr."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flopwatch")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _made_in_training(mistake: Mistake) -> Outcome:
    assert mistake.train is not None
    assert mistake.options is not None
    with _messages() as said:
        steps = mistake.train(mistake.options)
    return Outcome(tuple(map(_without_what_varies, said)), steps)


def _made_in_call(mistake: Mistake) -> Outcome:
    assert mistake.call is not None
    try:
        mistake.call()
    except flopwatch.FlopwatchError as error:
        return Outcome((str(error),), 1)
    return Outcome((), 0)


def _made_on_command_line(mistake: Mistake) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(mistake.written.split()[1:])
        except SystemExit as ended:
            status = int(ended.code or 0)
    text = _without_what_varies(out.getvalue() + err.getvalue()).strip()
    return Outcome((text,) if text else (), status)


def _without_what_varies(text: str) -> str:
    text = text.replace(os.getcwd(), "/home/me").replace(os.path.realpath("."), "/home/me")
    text = re.sub(r"process \d+", "process 4711", text)
    text = re.sub(r"MFU is [\d.]+ %", "MFU is 40120.1 %", text)
    return re.sub(r"(312 FLOP/s \().*?, fp32", r"\1A100, fp32", text)


def rows_on_screen(text: str) -> int:
    """How many rows of a terminal with 80 columns the text takes."""
    return sum(max(1, -(-len(line) // COLUMNS)) for line in text.splitlines())


def page(outcomes: Mapping[Mistake, Outcome]) -> str:
    head = """# The likeliest mistakes

What flopwatch says when something is written wrongly. In a training each message appears once, through Python's
`logging`, and the training goes on. A command prints the message and ends with a status that is not 0. Each message
takes at most three rows of a terminal with 80 columns. `python -m support.mistakes --update` in `tests/` makes every
mistake and writes this page.
"""
    parts = [head]
    groups = {
        "In a training": [mistake for mistake in outcomes if not mistake.is_command],
        "On the command line": [mistake for mistake in outcomes if mistake.is_command],
    }
    for title, mistakes in groups.items():
        rows = [f"| `{mistake.written}` | {_cell(outcomes[mistake].texts)} |" for mistake in mistakes]
        parts.append(f"\n## {title}\n\n| you write | flopwatch says |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _cell(texts: tuple[str, ...]) -> str:
    text = " ".join(texts).removeprefix("flopwatch: ")
    parts = re.split(r"(`[^`\n]*`)", text)  # every second part is code, in which a backslash would be shown
    parts[::2] = [re.sub(r"[\\*_\[\]<>]", r"\\\g<0>", part) for part in parts[::2]]
    return "<br>".join("".join(parts).replace("|", "\\|").splitlines())


if __name__ == "__main__":
    made = {mistake: make(mistake) for mistake in MISTAKES}
    if "--update" in sys.argv:
        PAGE.write_text(page(made), encoding="utf-8")
    for mistake, outcome in made.items():
        rows = [rows_on_screen(text) for text in outcome.texts]
        sys.stdout.write(f"{rows} {outcome.status} {mistake.written}: {outcome.texts}\n")
