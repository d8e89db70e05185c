"""Several inputs of sizes of their own: source and target, text and images, videos."""

import torch
import transformers
from torch import nn

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, Block, mlp, sgd


def encoder_decoder(audit: Audit) -> list[nn.Module]:
    """T5 with dynamic padding of source and target, each with lengths of its own."""
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, attn_implementation="eager")
    model = transformers.T5ForConditionalGeneration(config).train()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        source, target = torch.randint(4, 9, (2,)).tolist(), torch.randint(2, 6, (2,)).tolist()
        ids, labels = torch.randint(3, 32, (2, max(source))), torch.randint(3, 32, (2, max(target)))
        mask = torch.ones_like(ids)
        for row in range(2):
            mask[row, source[row] :] = 0
            labels[row, target[row] :] = -100
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        with audit.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Sees(nn.Module):
    """Words, and as many images as there are, whose patches stand before the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.patches = nn.Embedding(20, WIDTH), nn.Conv2d(3, WIDTH, 4, stride=4)
        self.block, self.head = Block(), nn.Linear(WIDTH, 20)

    def forward(self, words: torch.Tensor, images: list[torch.Tensor]) -> torch.Tensor:
        seen = [self.patches(image[None]).flatten(2).mT for image in images]
        return self.head(self.block(torch.cat([*seen, self.embedding(words)], 1))).square().mean()


def changing_images(audit: Audit) -> list[nn.Module]:
    """A vision-language model: none to three images of different sizes beside each text, in a list."""
    model = Sees()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        images = [torch.randn(3, 8, 8 + 4 * (index % 2)) for index in range(number % 4)]
        batch = {"words": torch.randint(0, 20, (1, 5)), "images": images}
        with audit.step(batch) as step:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Video(nn.Module):
    """Frames, rows and columns of patches, flattened; a grid tells how many there are of each."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block = nn.Linear(12, WIDTH), Block()

    def forward(self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor) -> torch.Tensor:
        hidden, begin, losses = self.into(pixel_values_videos), 0, []
        for frames, height, width in video_grid_thw.tolist():
            count = frames * height * width
            frame = hidden[begin : begin + count].view(frames, height * width, WIDTH)
            losses.append(self.block(frame).square().mean())
            begin += count
        return torch.stack(losses).mean()


def videos(audit: Audit) -> list[nn.Module]:
    """Videos as a flat list of patches; attention runs within a frame, so equal sums of patches cost differently."""
    model = Video()
    optimizer = sgd(model)
    audit.watch(model)
    grids = [[[2, 2, 3]], [[1, 3, 4]], [[4, 1, 3]], [[1, 2, 3], [1, 2, 3]]]
    for number in range(STEPS):
        grid = torch.tensor(grids[number % 4])
        batch = {"pixel_values_videos": torch.randn(12, 12), "video_grid_thw": grid}
        with audit.step(batch) as step:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Audio(nn.Module):
    """Convolutions over a waveform, then a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.recurrent = nn.Conv1d(1, WIDTH, 8, stride=4), nn.GRU(WIDTH, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.waves(waves[:, None]).mT)[0])


def speech(audit: Audit) -> list[nn.Module]:
    """CTC on waveforms of other lengths on every step."""
    model = Audio()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        waves = torch.randn(2, 40 + 7 * (number % 3))
        with audit.step(waves) as step:
            scores = model(waves).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((2,), len(scores))
            loss = nn.functional.ctc_loss(scores, torch.randint(1, 5, (2, 3)), lengths, torch.tensor([3, 3]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def object_detection(audit: Audit) -> list[nn.Module]:
    """A list of images of different sizes and a list of dicts of targets, as torchvision's detectors take them."""
    backbone, head = nn.Conv2d(3, WIDTH, 3, padding=1), mlp(WIDTH, 8, 4)

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = backbone, head

        def forward(
            self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]
        ) -> dict[str, torch.Tensor]:
            found = [self.head(self.backbone(image[None]).mean((2, 3))) for image in images]
            off = [(box - each["boxes"]).square().mean() for box, each in zip(found, targets, strict=True)]
            return {"loss_box": torch.stack(off).mean(), "loss_size": torch.cat(found).abs().mean()}

    model = Detector()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        images = [torch.randn(3, 6 + number % 2, 8), torch.randn(3, 7, 7)]
        targets = [{"boxes": torch.randn(1 + number % 3, 4)} for _ in images]
        with audit.step((images, targets)) as step:
            loss = sum(model(images, targets).values())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]
