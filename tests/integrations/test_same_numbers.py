"""The same tiny training through every framework costs the same, and what torch counts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import flopwatch
from testbeds.frameworks import tiny_run

pytestmark = pytest.mark.slow


@pytest.mark.portable
def test_a_plain_loop(tmp_path: Path) -> None:
    assert totals(plain_loop(tmp_path)) == tiny_run.truth()


@pytest.mark.portable
def test_hugging_face_trainer(tmp_path: Path) -> None:
    assert totals(hugging_face(tmp_path)) == tiny_run.truth()


def test_trl_sft_trainer(tmp_path: Path) -> None:
    """But for the head, which TRL does not run on a document's last position."""
    from testbeds.frameworks.tiny_sft import model_flops

    assert totals(trl(tmp_path)) == {**tiny_run.truth(), "total/model_flops": model_flops()}


@pytest.mark.portable
def test_accelerate(tmp_path: Path) -> None:
    assert totals(accelerate(tmp_path)) == tiny_run.truth()


@pytest.mark.portable
def test_lightning(tmp_path: Path) -> None:
    assert totals(lightning(tmp_path)) == tiny_run.truth()


def test_fabric(tmp_path: Path) -> None:
    assert totals(fabric(tmp_path)) == tiny_run.truth()


def totals(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values.get(key) for key in tiny_run.truth()}


def summary_of(monitor: flopwatch.TrainingMonitor | None) -> Mapping[str, Any]:
    assert monitor is not None
    assert monitor.summary is not None
    assert not monitor.summary.failed_parts
    return monitor.summary.values


def batches_by_step() -> list[list[Any]]:
    batches = list(tiny_run.loader())
    steps = [batches[start : start + tiny_run.ACCUMULATION] for start in range(0, len(batches), tiny_run.ACCUMULATION)]
    return steps * tiny_run.EPOCHS


def plain_loop(folder: Path) -> Mapping[str, Any]:
    model = tiny_run.model()
    with flopwatch.TrainingMonitor(folder, model=model) as monitor:
        train_by_hand(monitor, model, tiny_run.optimizer(model), lambda loss: loss.backward())
    return summary_of(monitor)


def fabric(folder: Path) -> Mapping[str, Any]:
    from lightning.fabric import Fabric

    from flopwatch.integrations.fabric import monitor_for

    framework = Fabric(accelerator="cpu", devices=1)
    plain = tiny_run.model()
    model, optimizer = framework.setup(plain, tiny_run.optimizer(plain))
    with monitor_for(framework, model, folder) as monitor:
        train_by_hand(monitor, model, optimizer, framework.backward)
    return summary_of(monitor)


def train_by_hand(
    monitor: flopwatch.TrainingMonitor, model: Any, optimizer: Any, backward: Callable[[Any], None]
) -> None:
    for batches in batches_by_step():
        with monitor.step() as step:
            for batch in batches:
                step.micro_batch(batch)
                loss = model(**batch).loss / len(batches)
                backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)


def hugging_face(folder: Path) -> Mapping[str, Any]:
    from flopwatch.integrations.hugging_face import FlopwatchCallback
    from testbeds.frameworks.tiny_hf import hf_trainer

    callback = FlopwatchCallback()
    hf_trainer(folder, callback).train()
    return summary_of(callback.monitor)


def trl(folder: Path) -> Mapping[str, Any]:
    from flopwatch.integrations.hugging_face import FlopwatchCallback
    from testbeds.frameworks.tiny_sft import sft_trainer

    callback = FlopwatchCallback()
    sft_trainer(folder, callback).train()
    return summary_of(callback.monitor)


def accelerate(folder: Path) -> Mapping[str, Any]:
    from accelerate import Accelerator

    from flopwatch.integrations.accelerate import AccelerateMonitor

    accelerator = Accelerator(gradient_accumulation_steps=tiny_run.ACCUMULATION, cpu=True)
    plain = tiny_run.model()
    model, optimizer, loader = accelerator.prepare(plain, tiny_run.optimizer(plain), tiny_run.loader())
    with AccelerateMonitor(accelerator, model, folder) as monitor:
        for _ in range(tiny_run.EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model), monitor.step(batch) as step:
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    step.log(loss=loss)
    return summary_of(monitor)


def lightning(folder: Path) -> Mapping[str, Any]:
    from flopwatch.integrations.lightning import FlopwatchCallback
    from testbeds.frameworks.tiny_lightning import TextModule, lightning_trainer

    callback = FlopwatchCallback()
    lightning_trainer(folder, callback).fit(TextModule(), tiny_run.loader())
    return summary_of(callback.monitor)
