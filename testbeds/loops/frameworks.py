"""Loops that a framework runs."""

from typing import Any

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback

from flopwatch.integrations.accelerate import AccelerateMonitor
from flopwatch.integrations.fabric import monitor_for
from flopwatch.integrations.hugging_face import FlopwatchCallback as TrainerMonitor
from flopwatch.integrations.lightning import FlopwatchCallback as LightningMonitor
from testbeds.frameworks.tiny_hf import hf_trainer
from testbeds.frameworks.tiny_lightning import ImageModule, lightning_trainer
from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, llama, mlp, sgd, text


class _TrainerSteps(TrainerCallback):
    """Tells the audit where a `Trainer`'s steps begin and end."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.audit.begin()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.audit.end(state.global_step)


def _train(audit: Audit, make_trainer: Any, **more: Any) -> list[nn.Module]:
    callback = TrainerMonitor(audit.folder / "flopwatch", peak_flops_per_s=1e12)
    trainer = make_trainer(audit.folder, callback, _TrainerSteps(audit), **more)
    trainer.train()
    audit.monitor = callback.monitor
    return [trainer.model]


def trainer(audit: Audit) -> list[nn.Module]:
    """Hugging Face's `Trainer` with accumulation and padded batches."""
    return _train(audit, hf_trainer, model=llama(vocab_size=128))


class _Distilling(Trainer):
    """A `compute_loss` of one's own, with a teacher."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(1)
        self.teacher = llama(vocab_size=128, num_hidden_layers=3)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        out = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = out.loss + functional.mse_loss(out.logits, wanted)
        return (loss, out) if return_outputs else loss


def trainer_with_a_loss_of_its_own(audit: Audit) -> list[nn.Module]:
    """A `Trainer` whose `compute_loss` calls a teacher too."""
    return _train(audit, hf_trainer, model=llama(vocab_size=128), kind=_Distilling)


def trainer_with_evaluation(audit: Audit) -> list[nn.Module]:
    """A `Trainer` that evaluates on the way."""
    more = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 1}
    return _train(audit, hf_trainer, model=llama(vocab_size=128), **more)


def sft(audit: Audit) -> list[nn.Module]:
    """TRL's `SFTTrainer`."""
    from testbeds.frameworks.tiny_sft import sft_trainer  # needs trl

    return _train(audit, sft_trainer, model=llama(vocab_size=128))


class _LightningSteps(Callback):
    """Tells the audit where Lightning's steps begin and end."""

    def __init__(self, audit: Audit) -> None:
        self.audit, self.done = audit, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.audit.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self.done:
            self.done = trainer.global_step
            self.audit.end(trainer.global_step - 1)


def _fit(audit: Audit, module: LightningModule, loader: Any, **more: Any) -> list[nn.Module]:
    callback = LightningMonitor(audit.folder / "flopwatch", peak_flops_per_s=1e12)
    trainer = lightning_trainer(audit.folder, callback, _LightningSteps(audit), **more)
    trainer.fit(module, loader)
    audit.monitor = callback.monitor
    return [module]


def lightning(audit: Audit) -> list[nn.Module]:
    """Lightning with automatic optimization and accumulation."""
    return _fit(audit, ImageModule(), ImageModule.batches())


class _Adversaries(LightningModule):
    """Two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.judge = mlp(4, 12, WIDTH), mlp(WIDTH, 12, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_judge = self.optimizers()
        (real,) = batch
        loss = self.judge(self(torch.randn(len(real), 4)).detach()).mean() - self.judge(real).mean()
        of_judge.zero_grad()
        self.manual_backward(loss)
        of_judge.step()
        of_generator.zero_grad()
        self.manual_backward(-self.judge(self(torch.randn(len(real), 4))).mean())
        of_generator.step()

    def configure_optimizers(self) -> Any:
        return sgd(self.generator), sgd(self.judge)


def lightning_by_hand(audit: Audit) -> list[nn.Module]:
    """Lightning with manual optimization: a GAN with two optimizers."""
    loader = DataLoader(TensorDataset(torch.randn(60, WIDTH)), batch_size=5)
    return _fit(audit, _Adversaries(), loader, accumulate_grad_batches=1, max_epochs=1)


def accelerate(audit: Audit) -> list[nn.Module]:
    """Accelerate, two micro-batches to a step."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    plain = llama()
    model, optimizer = accelerator.prepare(plain, sgd(plain))
    audit.monitor = AccelerateMonitor(accelerator, model, audit.folder, peak_flops_per_s=1e12, log_every=2)
    for number in range(2 * STEPS):
        batch = text(2, 5 + number % 3)
        audit.begin()
        with accelerator.accumulate(model), audit.monitor.step(batch, step=number // 2) as step:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        if number % 2:
            audit.end(number // 2)
    return [plain]


def fabric(audit: Audit) -> list[nn.Module]:
    """Lightning Fabric."""
    engine = Fabric(accelerator="cpu", devices=1)
    plain = llama()
    model, optimizer = engine.setup(plain, sgd(plain))
    audit.monitor = monitor_for(engine, model, audit.folder, peak_flops_per_s=1e12, log_every=2)
    for number in range(STEPS):
        batch = text(2, 5 + number % 3)
        with audit.step(batch) as step:
            loss = model(**batch).loss
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [plain]


def fabric_in_bf16(audit: Audit) -> list[nn.Module]:
    """Fabric with `bf16-mixed`, and a loss outside the model."""
    engine = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    plain = mlp(WIDTH, 12, 4)
    model, optimizer = engine.setup(plain, sgd(plain))
    audit.monitor = monitor_for(engine, model, audit.folder, peak_flops_per_s=1e12, log_every=2)
    for _ in range(STEPS):
        x, y = torch.randn(6, WIDTH), torch.randint(0, 4, (6,))
        with audit.step((x, y)) as step:
            loss = functional.cross_entropy(model(x), y)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [plain]
