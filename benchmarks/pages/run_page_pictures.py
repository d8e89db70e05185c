"""Make the pictures of a run's page: train a small language model on this machine, write its page, and photograph it.

    python benchmarks/pages/run_page_pictures.py [FOLDER]

About two minutes: padded batches, evaluations, checkpoints, recomputed activations, and one kill after which the
training resumes from its checkpoint. Chromium draws the page wide and narrow, light and dark. The run and the page
stay in FOLDER, if one is named.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwatch import TrainingMonitor

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
RUN = "runs/llm-demo"
STEPS, KILLED_AFTER = 600, 330
EVAL_EVERY, SAVE_EVERY = 100, 100
SAMPLES, LENGTH, WORDS, WIDTH, LAYERS = 8, 96, 512, 192, 3
MOST_BYTES = 150_000


class Decoder(nn.Module):
    """A few transformer layers, each of which computes its activations a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        scores = self.head(hidden)
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of different lengths, in which each word follows from the one before."""

    def __len__(self) -> int:
        return STEPS * SAMPLES

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(place)
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (1,), generator=chance))
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[:length] = (torch.arange(length) * 7 + torch.randint(0, 8, (1,), generator=chance)) % WORDS
        real = torch.arange(LENGTH) < length
        labels = torch.where(real.roll(-1) & real, ids.roll(-1), -100)
        return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


def train(kill_after: int | None) -> None:
    """Train from the checkpoint in this folder, if there is one; after `kill_after` steps the process kills itself."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    saved = Path("checkpoint.pt")
    with TrainingMonitor(RUN, model=model, log_every=10, total_steps=STEPS) as monitor:
        done = 0
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            done = int(state["step"])
        rest = torch.utils.data.Subset(Sentences(), range(done * SAMPLES, STEPS * SAMPLES))
        loader = torch.utils.data.DataLoader(rest, batch_size=SAMPLES)
        for number, batch in enumerate(monitor.batches(loader), start=done + 1):
            with monitor.step(batch) as step:
                loss = model(**batch)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss, grad_norm=norm, lr=3e-4)
            _between_steps(number, model, optimizer, monitor, saved)
            if number == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)


def _between_steps(
    number: int, model: nn.Module, optimizer: torch.optim.Optimizer, monitor: TrainingMonitor, saved: Path
) -> None:
    if number % EVAL_EVERY == 0:
        with monitor.phase("eval"), torch.no_grad():
            for batch in torch.utils.data.DataLoader(Sentences(), batch_size=SAMPLES, sampler=range(160)):
                model(**batch)
    if number % SAVE_EVERY == 0:
        with monitor.phase("checkpoint"):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
            torch.save({**state, "monitor": monitor.state_dict()}, saved)


def photograph(page: Path, name: str) -> list[Path]:
    """Draw the page in Chromium, wide and narrow, light and dark."""
    return [
        _draw(page, PICTURES / f"{name}-{width}-{scheme}.webp", width, height, scheme)
        for width, height in ((1280, 1700), (390, 1700))
        for scheme in ("light", "dark")
    ]


def _draw(page: Path, picture: Path, width: int, height: int, scheme: str) -> Path:
    """Photograph a frame of the wanted width, because Chromium's window is never narrower than 500."""
    with tempfile.TemporaryDirectory() as folder:
        shot, frame = Path(folder) / "shot.png", Path(folder) / "frame.html"
        style = f"border:0;width:{width}px;height:{height}px;color-scheme:{scheme}"
        frame.write_text(f'<body style="margin:0"><iframe src="{page.absolute().as_uri()}" style="{style}"></iframe>')
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark]
        size = f"--window-size={max(width, 500)},{height}"
        command = ["chromium", *options, f"--user-data-dir={folder}/browser", size, f"--screenshot={shot}"]
        subprocess.run([*command, frame.as_uri()], check=True, stderr=subprocess.DEVNULL)
        with Image.open(shot) as image:
            image.crop((0, 0, width, height)).convert("RGB").save(picture, quality=80, method=6)
    if picture.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{picture} has {picture.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    return picture


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(int(sys.argv[2]) if len(sys.argv) > 2 else None)
        return
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="flopwatch-pictures-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    child = [sys.executable, str(Path(__file__).absolute()), "--train"]
    subprocess.run([*child, str(KILLED_AFTER)], check=False, cwd=folder)
    subprocess.run(child, check=True, cwd=folder)
    page = folder / "run.html"
    command = [sys.executable, "-m", "flopwatch", "report", str(folder / RUN), "--html", str(page)]
    subprocess.run(command, check=True)
    for picture in photograph(page, "run-page"):
        print(f"{picture}: {picture.stat().st_size:,} bytes")
    if len(sys.argv) == 1:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
