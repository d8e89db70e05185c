"""A language model with padded batches, gradient clipping, evaluation and checkpoints, monitored from start to end.

python examples/train.py --steps 60

Look at it from a second terminal: flopwatch watch runs/example
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

import flopwatch

VOCABULARY = 1000


def batches(batch_size: int, longest: int) -> Iterator[dict[str, torch.Tensor]]:
    """Texts of different lengths, padded to the longest of each batch."""
    generator = torch.Generator().manual_seed(0)
    while True:
        lengths = torch.randint(longest // 2, longest + 1, (batch_size,), generator=generator)
        width = int(lengths.max())
        # Rows that count up by 1 to 8, so that there is something to learn: the loss comes down to ln 8, or 2.08.
        ids = torch.randint(1, 9, (batch_size, width), generator=generator)
        ids[:, 0] = torch.randint(0, VOCABULARY, (batch_size,), generator=generator)
        ids = ids.cumsum(1) % VOCABULARY
        mask = (torch.arange(width) < lengths[:, None]).long()
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("runs/example"))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sinks", default="console")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = flopwatch.load_model(arguments.model, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(batch_size=8, longest=128)
    sinks = [name for name in arguments.sinks.split(",") if name]
    with flopwatch.TrainingMonitor(
        arguments.folder, model=model, log_every=10, total_steps=arguments.steps, sinks=sinks
    ) as monitor:
        for number in range(arguments.steps):
            batch = next(data)
            with monitor.step(batch, epoch=number / arguments.steps) as step:
                loss = model(input_ids=batch["input_ids"], labels=batch["labels"])["loss"]
                loss.backward()
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss, grad_norm=grad_norm, lr=3e-3)
            if number % 50 == 49:
                with monitor.phase("eval"), torch.no_grad():
                    for _ in range(5):
                        held_out = next(data)
                        model(input_ids=held_out["input_ids"], labels=held_out["labels"])
                with monitor.phase("checkpoint"):
                    torch.save(
                        {"model": model.state_dict(), "monitor": monitor.state_dict()},
                        arguments.folder / "checkpoint.pt",
                    )


if __name__ == "__main__":
    main()
