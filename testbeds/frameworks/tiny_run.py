"""One small training, the same for every framework: rows of different lengths, two micro-batches to a step."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from testbeds.architectures import BY_NAME, true_flops

EPOCHS = 2
BATCH_SIZE = 4
ACCUMULATION = 2
PAD = 0


@cache
def rows() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 30, (24,), generator=generator).tolist()
    return tuple(tuple(torch.randint(10, 128, (length,), generator=generator).tolist()) for length in lengths)


def dataset() -> list[dict[str, list[int]]]:
    return [{"input_ids": list(row)} for row in rows()]


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(example["input_ids"]) for example in examples]

    def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": padded(ids, PAD),
        "attention_mask": padded([torch.ones_like(each) for each in ids], 0),
        "labels": padded(ids, -100),
    }


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]


def model(*, dropout: float = 0.0) -> nn.Module:
    built = BY_NAME["llama"].build()
    for layer in built.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = dropout
    return built


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@cache
def truth() -> dict[str, int]:
    """Counted by torch itself on each row alone, eagerly; positions counted by hand."""
    eager = BY_NAME["llama"].build(eager=True)

    def counted(row: tuple[int, ...], times: int) -> int:
        ids = torch.tensor([row] * times)
        return true_flops(eager, {"input_ids": ids, "labels": ids})

    # A batch computes once what its rows share, at the length of the longest; in transformers 4 the rotary embeddings.
    alone = {row: counted(row, 1) for row in rows()}
    shared = {row: 2 * alone[row] - counted(row, 2) for row in rows()}
    chunks = [rows()[start : start + BATCH_SIZE] for start in range(0, len(rows()), BATCH_SIZE)]
    flops = sum(sum(alone[row] - shared[row] for row in chunk) + shared[max(chunk, key=len)] for chunk in chunks)
    steps = -(-len(chunks) // ACCUMULATION)
    return {
        "total/steps": EPOCHS * steps,
        "total/samples": EPOCHS * len(rows()),
        "total/tokens": EPOCHS * sum(len(chunk) * max(map(len, chunk)) for chunk in chunks),
        "total/real_tokens": EPOCHS * sum(map(len, rows())),
        "total/model_flops": EPOCHS * flops,
    }


def can_choose_order() -> bool:
    """Whether the Trainer has a setting for the order of the rows; transformers 4 has none."""
    from transformers import TrainingArguments

    return "train_sampling_strategy" in TrainingArguments.__dataclass_fields__


def training_arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """For `TrainingArguments` and what derives from it."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": ACCUMULATION,
        "num_train_epochs": EPOCHS,
        **({"train_sampling_strategy": "sequential"} if can_choose_order() else {}),
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **more,
    }


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
