"""Loops with more than one model, or more than one pass: the calls of the watched model are not all that runs."""

import copy

import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, Block, TinyGPT, ids, mlp, sgd


def gan(audit: Audit) -> list[nn.Module]:
    """A generator and a discriminator with an optimizer each; the generator is monitored."""
    generator, judge = mlp(4, 12, WIDTH), mlp(WIDTH, 12, 1)
    of_generator, of_judge = sgd(generator), sgd(judge)
    audit.watch(generator)
    for _ in range(STEPS):
        real, noise = torch.randn(6, WIDTH), torch.randn(6, 4)
        with audit.step(real) as step:
            fake = generator(noise)
            loss = judge(fake.detach()).exp().mean() - judge(real).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            of_generator.zero_grad()
            (-judge(fake).mean()).backward()
            of_generator.step()
            step.log(loss=loss)
    return [generator, judge]


def gradient_penalty(audit: Audit) -> list[nn.Module]:
    """WGAN-GP: the critic's gradient with respect to its input is trained, a backward pass through a backward pass."""
    generator, critic = mlp(4, 12, WIDTH), mlp(WIDTH, 12, 1)
    of_generator, of_critic = sgd(generator), sgd(critic)
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    audit.watch(both)
    for number in range(STEPS):
        real = torch.randn(6, WIDTH)
        with audit.step(real):
            fake = generator(torch.randn(6, 4)).detach()
            mixed = (real + torch.rand(6, 1) * (fake - real)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            of_critic.zero_grad()
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
            of_critic.step()
            if number % 5 == 4:  # the generator is trained more rarely
                of_generator.zero_grad()
                (-critic(generator(torch.randn(6, 4))).mean()).backward()
                of_generator.step()
    return [both]


def _distillation(audit: Audit, how: str) -> list[nn.Module]:
    student, teacher = mlp(WIDTH, 8, 4), mlp(WIDTH, 32, 4)
    optimizer = sgd(student)
    audit.watch(student)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x) as step:
            if how == "no_grad":
                with torch.no_grad():
                    wanted = teacher(x)
            elif how == "inference_mode":
                with torch.inference_mode():
                    wanted = teacher(x).clone()
                wanted = wanted.detach().clone()
            else:
                wanted = teacher(x)
            loss = functional.mse_loss(student(x), wanted.clone() if how == "inference_mode" else wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [student]


def distillation(audit: Audit) -> list[nn.Module]:
    """A larger teacher without gradients."""
    return _distillation(audit, "no_grad")


def distillation_in_inference_mode(audit: Audit) -> list[nn.Module]:
    """A teacher in `torch.inference_mode`."""
    return _distillation(audit, "inference_mode")


def distillation_with_gradients(audit: Audit) -> list[nn.Module]:
    """A teacher that is not frozen: its gradients are computed too."""
    return _distillation(audit, "grad")


def simcse(audit: Audit) -> list[nn.Module]:
    """SimCSE: the same batch twice through dropout, all pairs compared outside the model."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 6))
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x) as step:
            one, other = model(x), model(x)
            loss = functional.cross_entropy(one @ other.T, torch.arange(5))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def r_drop(audit: Audit) -> list[nn.Module]:
    """R-Drop: two passes of one batch, with a loss on the difference of their outputs."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(5, WIDTH), torch.randint(0, 4, (5,))
        with audit.step((x, y)) as step:
            one, other = model(x), model(x)
            apart = functional.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
            loss = functional.cross_entropy(one, y) + functional.cross_entropy(other, y) + apart
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def _follow(average: nn.Module, model: nn.Module, keep: float = 0.9) -> None:
    with torch.no_grad():
        for slow, weight in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(weight, 1 - keep)


def byol(audit: Audit) -> list[nn.Module]:
    """BYOL: a predictor, two views, and a target network that follows slowly."""
    online = nn.ModuleDict({"encoder": mlp(WIDTH, 12, 6), "predictor": mlp(6, 6)})
    target = copy.deepcopy(online["encoder"])
    optimizer = sgd(online)
    audit.watch(online["encoder"])
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x) as step:
            views = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
            with torch.no_grad():
                wanted = [target(view) for view in views]
            guesses = [online["predictor"](online["encoder"](view)) for view in views]
            loss = (
                -functional.cosine_similarity(guesses[0], wanted[1]).mean()
                - functional.cosine_similarity(guesses[1], wanted[0]).mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _follow(target, online["encoder"])
            step.log(loss=loss)
    return [online, target]


def moco(audit: Audit) -> list[nn.Module]:
    """MoCo: a queue of keys, whose product with the queries lies outside the model and grows with the queue."""
    model = mlp(WIDTH, 12, 6)
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    queue = torch.randn(0, 6)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH)
        with audit.step(x) as step:
            queries = model(x)
            with torch.no_grad():
                keys = average(x)
            scores = queries @ torch.cat([keys, queue]).T
            loss = functional.cross_entropy(scores, torch.arange(4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _follow(average, model)
            queue = torch.cat([keys, queue])[:16]
            step.log(loss=loss)
    return [model, average]


def mean_teacher(audit: Audit) -> list[nn.Module]:
    """A teacher that is the average of the student; labelled and unlabelled samples in one step."""
    student = mlp(WIDTH, 12, 4)
    teacher = copy.deepcopy(student)
    optimizer = sgd(student)
    audit.watch(student)
    for _ in range(STEPS):
        labelled, more = torch.randn(4, WIDTH), torch.randn(10, WIDTH)
        with audit.step(labelled) as step:
            with torch.no_grad():
                wanted = teacher(more).softmax(-1)
            loss = functional.cross_entropy(student(labelled), torch.randint(0, 4, (4,)))
            loss = loss + functional.mse_loss(student(more).softmax(-1), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _follow(teacher, student)
            step.log(loss=loss)
    return [student, teacher]


def maml(audit: Audit) -> list[nn.Module]:
    """MAML: steps inside a step, through which the outer gradient goes; the number of inner steps grows."""
    model = mlp(WIDTH, 12, 1)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x) as step:
            weights = dict(model.named_parameters())
            for _ in range(1 + number // 6):
                inner = torch.func.functional_call(model, weights, (x,)).square().mean()
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                pairs = zip(weights.items(), slopes, strict=True)
                weights = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
            loss = torch.func.functional_call(model, weights, (x,)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def _log_likelihood(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])[0].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))


def dpo(audit: Audit) -> list[nn.Module]:
    """DPO: policy and reference on chosen and rejected answers of different lengths."""
    policy = TinyGPT()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = sgd(policy)
    audit.watch(policy)
    for number in range(STEPS):
        chosen, rejected = ids(2, 6 + number % 2), ids(2, 7)
        with audit.step({"chosen": chosen, "rejected": rejected}) as step:
            margin = _log_likelihood(policy, chosen) - _log_likelihood(policy, rejected)
            with torch.no_grad():
                expected = _log_likelihood(reference, chosen) - _log_likelihood(reference, rejected)
            loss = -functional.logsigmoid(0.1 * (margin - expected)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [policy]


def contrastive(audit: Audit) -> list[nn.Module]:
    """InfoNCE outside the model: the product of all pairs grows with the square of the batch."""
    model = mlp(WIDTH, 12, 6)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(4 + number % 2, WIDTH)
        with audit.step(x) as step:
            found = functional.normalize(model(x), dim=-1)
            loss = functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(x)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Clip(nn.Module):
    """An image tower and a text tower, compared in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.embedding, self.texts = mlp(12, 8, 6), nn.Embedding(20, WIDTH), Block()
        self.into = nn.Linear(WIDTH, 6)

    def forward(self, pixels: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        images = functional.normalize(self.images(pixels), dim=-1)
        texts = functional.normalize(self.into(self.texts(self.embedding(words)).mean(1)), dim=-1)
        scores = images @ texts.T
        return (
            functional.cross_entropy(scores, torch.arange(len(scores)))
            + functional.cross_entropy(scores.T, torch.arange(len(scores)))
        ) / 2


def clip(audit: Audit) -> list[nn.Module]:
    """CLIP: two towers, all pairs compared in the model."""
    model = Clip()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        batch = {"pixels": torch.randn(3 + number % 3, 12), "words": ids(3 + number % 3, 5)}
        with audit.step(batch) as step:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def triplet(audit: Audit) -> list[nn.Module]:
    """Anchor, positive and negative in three calls of one model."""
    model = mlp(WIDTH, 12, 6)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        three = torch.randn(3, 5, WIDTH)
        with audit.step(three) as step:
            loss = functional.triplet_margin_loss(*(model(each) for each in three))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def two_models_in_one_optimizer(audit: Audit) -> list[nn.Module]:
    """An encoder that is monitored and a decoder that is not, trained together."""
    encoder, decoder = mlp(WIDTH, 12, 4), mlp(4, 12, WIDTH)
    optimizer = sgd(encoder, decoder)
    audit.watch(encoder)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x) as step:
            loss = functional.mse_loss(decoder(encoder(x)), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [encoder, decoder]


def average_of_weights(audit: Audit) -> list[nn.Module]:
    """`torch.optim.swa_utils.AveragedModel` beside the model: a copy that is never called."""
    model = mlp(WIDTH, 12, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    return [model, average]
