"""A trainer of your own in a sweep: a class with `forward`, `backward` and `update`, compared with a built-in one.

python examples/extending/custom_trainer.py
"""

import torch

import flopwatch


class SignTrainer:
    """Updates every weight by the sign of its gradient, so it needs no memory for the state of an optimizer."""

    def __init__(self, model, settings) -> None:
        self.model = model
        self.lr = settings.options.get("lr", 1e-3)

    def forward(self, batch):
        return self.model(**batch)["loss"]

    def backward(self, loss) -> None:
        loss.backward()

    @torch.no_grad()
    def update(self) -> None:
        for weight in self.model.parameters():
            weight -= self.lr * weight.grad.sign()
            weight.grad = None


def main() -> None:
    matrix = {
        "trainer": ["standard", "custom_trainer:SignTrainer"],  # module:Class, in the folder of this script
        "model": ["tiny"],
        "batch_size": [4],
        "seq_len": [64],
        "steps": 5,
        "warmup_steps": 1,
    }
    flopwatch.sweep.run(matrix, "runs/custom_trainer")
    for trial in flopwatch.report.load("runs/custom_trainer"):
        print(f"{trial['label']}: {trial['outcome']}, {trial['model_flops']:,} FLOPs per step.")
        print(f"{trial['label']}: the update takes {trial['optimizer_seconds']:.4f} s of a step.")


if __name__ == "__main__":
    main()
