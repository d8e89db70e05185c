"""The training scripts of this folder, and for each the lines that write a TrainingMonitor into it.

No script has a line of flopwatch, except the one that shows what happens then. A test runs each of them as it is, with
`flopwatch run`, and with the monitor written in, and compares.
"""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

_MONITOR = """import flopwatch
monitor = flopwatch.TrainingMonitor(FOLDER_OF_RUN, {options})
"""


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        path: Relative to this folder.
        what: What is special about the training.
        edits: Pairs of a text that occurs once in the script, and its replacement with the monitor. Empty if the
            script uses a monitor itself, or cannot.
        ranks: Processes that torchrun starts.
        lacks: Values of a step that `flopwatch run` cannot know, but the monitor that is written in can.
        lacks_first: Such values of the first step only.
        not_measured: Steps that `flopwatch run` does not measure, as notices say.
        notice: Code of the notice that says why.
    """

    path: str
    what: str
    edits: tuple[tuple[str, str], ...] = ()
    ranks: int = 1
    lacks: tuple[str, ...] = ()
    lacks_first: tuple[str, ...] = ()
    not_measured: tuple[int, ...] = ()
    notice: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def file(self) -> Path:
        return FOLDER / self.path

    def with_monitor(self, folder_of_run: Path) -> str:
        """The source with the monitor written in."""
        source = self.file.read_text("utf-8")
        for old, new in self.edits:
            assert source.count(old) == 1, f"{self.path}: {old!r} must occur once"
            source = source.replace(old, new.replace("FOLDER_OF_RUN", repr(str(folder_of_run))))
        return source


def _in_loop(loop: str, call: str, batch: str, options: str = "model=model") -> tuple[tuple[str, str], ...]:
    """Edits for a loop whose body is one optimizer step. The body, with 4 spaces, goes into a `with` of 2 spaces."""
    return (
        (f"{loop}\n", f"{_MONITOR.format(options=options)}{loop}\n  with monitor.step() as measured:\n"),
        (f"    {call}", f"    measured.micro_batch({batch})\n    {call}"),
        ("\ndigest =", "\nmonitor.close()\ndigest ="),
    )


def _with_callback(integration: str, before: str) -> tuple[tuple[str, str], ...]:
    lines = f"""import flopwatch.integrations.{integration} as flopwatch
trainer.{{add}}(flopwatch.FlopwatchCallback(FOLDER_OF_RUN))
"""
    add = "add_callback" if integration == "hugging_face" else "callbacks.append"
    return ((before, lines.format(add=add) + before),)


_STEPS_50, _UNNUMBERED_50, _UNNUMBERED_40 = "for step in range(50):", "for _ in range(50):", "for _ in range(40):"
_LANGUAGE_LOSS = "loss = nn.functional.cross_entropy(model(ids[:, :-1])"
_ACCELERATE_MONITOR = """import flopwatch.integrations.accelerate
monitor = flopwatch.integrations.accelerate.AccelerateMonitor(accelerator, model, FOLDER_OF_RUN)
"""

SCRIPTS = (
    Script("loops/plain.py", "plain loop", _in_loop(_STEPS_50, "logits = model(", "ids[:, :-1]")),
    Script(
        "loops/accumulation.py",
        "gradient accumulation",
        (
            ("for number, (", _MONITOR.format(options="model=model") + "for number, ("),
            ("    loss = nn.f", "    monitor.start_step()\n    monitor.micro_batch(features)\n    loss = nn.f"),
            ("        optimizer.zero", "        monitor.log_step(number // ACCUMULATION)\n        optimizer.zero"),
            ("\ndigest =", "\nmonitor.close()\ndigest ="),
        ),
    ),
    Script("loops/autocast.py", "autocast to bfloat16", _in_loop(_UNNUMBERED_50, "with torch.autocast", "images")),
    Script(
        "loops/compiled.py",
        "`torch.compile(model)`",
        _in_loop(_UNNUMBERED_50, "loss = (compiled", "features", "model=compiled"),
        lacks_first=("samples",),
    ),
    Script(
        "loops/compiled_in_place.py",
        "`model.compile()`",
        _in_loop(_UNNUMBERED_50, "loss = (model", "features"),
        lacks_first=("samples",),
    ),
    Script(
        "loops/nanogpt.py",
        "as nanoGPT: compiled, accumulation, autocast, evaluation",
        (
            ("for step in range(40):", _MONITOR.format(options="model=model") + "for step in range(40):"),
            ("        with torch.no_grad():", '        with torch.no_grad(), monitor.phase("eval"):'),
            ("    for _ in range(ACC", "    monitor.start_step()\n    for _ in range(ACC"),
            ("        with torch.auto", "        monitor.micro_batch((ids, targets))\n        with torch.auto"),
            ("to_none=True)\n", "to_none=True)\n    monitor.log_step(step)\n"),
            ("\ndigest =", "\nmonitor.close()\ndigest ="),
        ),
        lacks_first=("samples", "tokens", "real_tokens"),
    ),
    Script(
        "loops/evaluation.py",
        "evaluation between steps",
        (
            (_STEPS_50, _MONITOR.format(options="model=model") + _STEPS_50),
            ("    loss = loss_of(ids)\n", "    monitor.start_step()\n    loss = loss_of(ids)\n"),
            (
                "    optimizer.zero_grad()\n",
                "    optimizer.zero_grad()\n    monitor.log_step(step, batch=ids[:, :-1])\n",
            ),
            ("    model.eval()\n    with", '    model.eval()\n    with monitor.phase("eval"), '),
            ("\ndigest =", "\nmonitor.close()\ndigest ="),
        ),
    ),
    Script(
        "loops/other_method.py",
        "the loss comes from a method other than `forward`",
        _in_loop(_UNNUMBERED_50, "loss = model.loss", "features"),
        lacks=("samples",),
        not_measured=(0,),
    ),
    Script("loops/own_monitor.py", "a script that uses `TrainingMonitor` itself"),
    Script(
        "several/gan.py",
        "GAN: two models, two optimizers",
        _in_loop(_UNNUMBERED_50, "fake = generator", "real", "model=generator"),
        lacks=("samples",),
        not_measured=(0,),
        notice="several_models",
    ),
    Script(
        "several/teacher_student.py",
        "teacher and student",
        _in_loop(_UNNUMBERED_50, "loss = nn", "ids", "model=student"),
    ),
    Script(
        "several/replaced_model.py",
        "the model is replaced in mid-run",
        (
            *_in_loop(_STEPS_50, "loss = nn", "features"),
            ("        model = new_model(64)\n", "        model = new_model(64)\n        monitor.set_model(model)\n"),
        ),
    ),
    Script(
        "several/two_optimizers.py",
        "two optimizers for one model",
        _in_loop(_UNNUMBERED_50, _LANGUAGE_LOSS, "ids[:, :-1]"),
        not_measured=(0,),
    ),
    Script("ranks/ddp.py", "DDP, 2 ranks", _in_loop(_UNNUMBERED_40, _LANGUAGE_LOSS, "ids[:, :-1]"), ranks=2),
    Script(
        "ranks/fsdp2.py",
        "FSDP2, 2 ranks",
        (
            *_in_loop(_UNNUMBERED_40, _LANGUAGE_LOSS, "ids[:, :-1]")[:2],
            ("\nshards =", "\nmonitor.close()\nshards ="),
        ),
        ranks=2,
    ),
    Script(
        "ranks/torchtitan_like.py",
        "as torchtitan: compiled blocks and FSDP2, 2 ranks",
        (
            *_in_loop(_UNNUMBERED_40, _LANGUAGE_LOSS, "ids[:, :-1]")[:2],
            ("\nshards =", "\nmonitor.close()\nshards ="),
        ),
        ranks=2,
        lacks_first=("samples", "tokens", "real_tokens"),
    ),
    Script(
        "frameworks/hf_trainer.py",
        "Hugging Face `Trainer`",
        _with_callback("hugging_face", "loss = trainer.train()"),
    ),
    Script(
        "frameworks/trl_sft.py",
        "TRL `SFTTrainer`",
        _with_callback("hugging_face", "loss = trainer.train()"),
    ),
    Script("frameworks/lightning_module.py", "Lightning", _with_callback("lightning", "trainer.fit(")),
    Script(
        "frameworks/accelerate_loop.py",
        "Accelerate with gradient accumulation",
        (
            ("for (ids,)", f"{_ACCELERATE_MONITOR}for (ids,)"),
            ("accumulate(model):", "accumulate(model), monitor.step(ids[:, :-1]):"),
            ("\ndigest =", "\nmonitor.close()\ndigest ="),
        ),
    ),
)
