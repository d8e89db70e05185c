"""A LightningModule with a `forward`; the first argument is the folder for Lightning's output."""

import hashlib
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))

    def forward(self, features):
        return self.layers(features)

    def training_step(self, batch, batch_idx):
        features, labels = batch
        return nn.functional.cross_entropy(self(features), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


loader = DataLoader(TensorDataset(torch.randn(400, 12), torch.randint(0, 4, (400,))), batch_size=5)
module = Classifier()
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=40,
    accumulate_grad_batches=2,
    default_root_dir=sys.argv[1],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
print(f"{trainer.global_step} steps, parameters {digest}")
