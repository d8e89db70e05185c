"""A training that waits for its input on every step, at the place that its argument names.

It does not know flopwatch. It prints the seconds that it has slept, which are the truth about its input wait.
"""

import json
import queue
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LATE_SECONDS, STEPS, WIDTH = 0.3, 24, 256
slept = 0.0


def late(parts=1):
    global slept
    began = time.perf_counter()
    time.sleep(LATE_SECONDS / parts)
    slept += time.perf_counter() - began


def get_batch(parts=1):
    late(parts)
    return torch.randn(8, WIDTH), torch.randint(10, (8,))


class Samples(Dataset):
    """Each sample takes its eighth of the time of a batch."""

    def __init__(self, count=8 * STEPS, is_late=True, named=False):
        self.count, self.is_late, self.named = count, is_late, named

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.is_late:
            late(8)
        x, y = torch.randn(WIDTH), torch.randint(10, ())
        return {"x": x, "labels": y} if self.named else (x, y)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 10))


criterion = nn.CrossEntropyLoss()


def plain(batches):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dataloader():
    plain(DataLoader(Samples(), batch_size=8))


def collate():
    def put_together(samples):
        late()
        return torch.utils.data.default_collate(samples)

    plain(DataLoader(Samples(is_late=False), batch_size=8, collate_fn=put_together))


def before():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = get_batch()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def generator():
    plain(get_batch() for _ in range(STEPS))


def thread():
    """What the producing thread sleeps while the other one trains is no input wait."""
    waiting: queue.Queue = queue.Queue(1)

    def produce():
        for _ in range(STEPS):
            time.sleep(LATE_SECONDS)
            waiting.put((torch.randn(8, WIDTH), torch.randint(10, (8,))))
        waiting.put(None)

    def take():
        global slept
        began = time.perf_counter()
        batch = waiting.get()
        slept += time.perf_counter() - began
        return batch

    threading.Thread(target=produce, daemon=True).start()
    plain(iter(take, None))


def between(compiles=False):
    """As in nanoGPT: the next batch is fetched after the forward pass, while a GPU would still compute."""
    model = make_model()
    called = torch.compile(model, backend="aot_eager") if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = get_batch()
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(called(x), y)
        x, y = get_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def compiled():
    between(compiles=True)


def accumulation(fetches_between=False):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = get_batch(4)
    for _ in range(STEPS):
        for _ in range(4):
            if not fetches_between:
                x, y = get_batch(4)
            loss = nn.functional.cross_entropy(model(x), y) / 4
            if fetches_between:
                x, y = get_batch(4)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accumulation_between():
    accumulation(fetches_between=True)


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(criterion(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def hf():
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def forward(self, x, labels):
            logits = self.layers(x)
            return {"loss": criterion(logits, labels), "logits": logits}

    arguments = TrainingArguments(
        "hf", num_train_epochs=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    Trainer(Model(), arguments, train_dataset=Samples(named=True)).train()


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def training_step(self, batch, index):
            return criterion(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Module(), DataLoader(Samples(), batch_size=8))


PLACES = (
    *(dataloader, collate, between, before, thread, generator, compiled, accumulation, accumulation_between),
    *(accelerate, hf, lightning),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    next(place for place in PLACES if place.__name__ == sys.argv[1])()
    print("SLEPT", json.dumps(slept))
