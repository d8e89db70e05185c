"""A monitor in training loops with Lightning Fabric."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from flopwatch.integrations.fabric import monitor_for
from testbeds.frameworks import tiny_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo, of itself
]


def fabric_for_cpu(**options):
    return Fabric(accelerator="cpu", devices=1, **options)


def train(fabric, folder, *, compiled=False, make_monitor=monitor_for, epochs=1):
    """Each batch a step; `make_monitor` None trains without."""
    torch.manual_seed(0)
    plain = tiny_run.model(dropout=0.2)
    wrapped = torch.compile(plain, backend="eager") if compiled else plain
    model, optimizer = fabric.setup(wrapped, tiny_run.optimizer(plain))
    monitor = make_monitor(fabric, model, folder) if make_monitor else None
    for _ in range(epochs):
        for batch in tiny_run.loader():
            if monitor:
                monitor.start_step()
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if monitor:
                monitor.log_step(0, loss=loss, batch=batch)
    if monitor:
        monitor.close()
    return monitor, tiny_run.parameters(plain)


def test_a_pair_may_have_more_than_the_model_takes(tmp_path):
    fabric = fabric_for_cpu()
    model = fabric.setup_module(nn.Linear(12, 4))
    batch = torch.randn(5, 12), torch.zeros(5)
    with monitor_for(fabric, model, tmp_path) as monitor, monitor.step(batch):
        fabric.backward(model(batch[0]).sum())
    assert monitor.summary.values["total/model_flops"] == 5 * 2 * (2 * 12 * 4)


def test_totals_go_on_from_a_saved_state(tmp_path):
    def steps(fabric, folder, before=lambda state: None):
        model = fabric.setup_module(nn.Linear(12, 4))
        with monitor_for(fabric, model, folder, mode="estimate") as monitor:
            before({"model": model, "monitor": monitor})
            for _ in range(3):
                with monitor.step(torch.randn(5, 12)):
                    pass
            fabric.save(folder / "state", {"model": model, "monitor": monitor})
        return monitor.summary

    fabric = fabric_for_cpu()
    steps(fabric, tmp_path / "first")
    summary = steps(fabric, tmp_path / "second", lambda state: fabric.load(tmp_path / "first" / "state", state))
    assert summary.values["total/samples"] == 2 * 3 * 5
    assert summary.step == 5
