"""Lightning on the tiny run."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopwatch.integrations.lightning import FlopwatchCallback
from testbeds.frameworks import tiny_run


def quick_callback(**options):
    """Without counting, for what does not concern FLOPs."""
    return FlopwatchCallback(mode="estimate", **options)


class TextModule(LightningModule):
    """A Hugging Face model in `self.model`, batches that are dicts."""

    logs = True

    def __init__(self, model=None):
        super().__init__()
        self.model = model or tiny_run.model()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        if self.logs:
            self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return tiny_run.optimizer(self)


class ImageModule(LightningModule):
    """Layers of its own and a `forward`, batches that are pairs."""

    logs = True

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 4)

    def forward(self, pixels):
        return self.head(self.encoder(pixels))

    def training_step(self, batch, batch_idx):
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self(pixels), labels)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return tiny_run.optimizer(self)

    @staticmethod
    def batches():
        generator = torch.Generator().manual_seed(0)
        pixels, labels = torch.randn(60, 12, generator=generator), torch.randint(0, 4, (60,), generator=generator)
        return DataLoader(TensorDataset(pixels, labels), batch_size=5)

    @staticmethod
    def step_flops():
        """Two layers on 5 samples: forward, weight gradients, and the input gradient of the second layer only."""
        return 5 * (2 * (2 * 12 * 8) + 3 * (2 * 8 * 4))


def lightning_trainer(folder, *callbacks, kind=Trainer, **more):
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": tiny_run.EPOCHS,
        "accumulate_grad_batches": tiny_run.ACCUMULATION,
        "log_every_n_steps": 2,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": list(callbacks),
    }
    return kind(**(options | more))
