"""Loops that sample: reinforcement learning, generation, diffusion."""

import copy

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, llama, mlp, sgd


def _answers(model: nn.Module, prompts: torch.Tensor, words: int, *, is_fixed: bool) -> torch.Tensor:
    ends = None if is_fixed else list(range(2, 32, 2))  # so many that lengths differ
    how = GenerationConfig(max_new_tokens=words, min_new_tokens=1, do_sample=True, pad_token_id=0, eos_token_id=ends)
    with torch.no_grad():
        return model.generate(prompts, generation_config=how)


def _log_likelihood(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None])[..., 0]


def _grpo(audit: Audit, *, is_fixed: bool) -> list[nn.Module]:
    policy = llama()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = sgd(policy)
    audit.watch(policy)
    for _ in range(STEPS):
        prompts = torch.randint(3, 32, (1, 4)).expand(3, -1)
        with audit.step({"input_ids": prompts}) as step:
            tokens = _answers(policy, prompts, 4, is_fixed=is_fixed)
            rewards = (tokens[:, 4:] % 7).float().mean(1)
            gains = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            found = _log_likelihood(policy, tokens)
            with torch.no_grad():
                expected = _log_likelihood(reference, tokens)
            loss = -(gains[:, None] * found).mean() + 0.1 * (found - expected).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [policy]


def grpo(audit: Audit) -> list[nn.Module]:
    """GRPO: answers of a fixed length are generated with a cache, then policy and reference read them."""
    return _grpo(audit, is_fixed=True)


def grpo_with_ends(audit: Audit) -> list[nn.Module]:
    """GRPO whose answers end when they want to: every step has its own length."""
    return _grpo(audit, is_fixed=False)


def ppo(audit: Audit) -> list[nn.Module]:
    """PPO: a rollout without gradients, then several epochs of updates of policy and value in one step."""
    policy, value = mlp(WIDTH, 12, 3), mlp(WIDTH, 12, 1)
    optimizer = sgd(policy, value)
    audit.watch(policy)
    for _ in range(STEPS):
        with audit.step() as step:
            with torch.no_grad():
                states = [torch.randn(1, WIDTH)]
                for _ in range(5):
                    action = torch.distributions.Categorical(logits=policy(states[-1])).sample()
                    states.append(states[-1].roll(int(action), -1) + 0.1)
                seen = torch.cat(states)
                before = policy(seen).log_softmax(-1)
            for _ in range(3):
                ratio = (policy(seen).log_softmax(-1) - before).exp()
                gain = seen.mean(1, keepdim=True) - value(seen)
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + gain.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            step.log(loss=loss)
    return [policy, value]


def reinforce(audit: Audit) -> list[nn.Module]:
    """REINFORCE: episodes of different lengths, one call of the policy for each action."""
    policy = mlp(WIDTH, 12, 2)
    optimizer = sgd(policy)
    audit.watch(policy)
    for _ in range(STEPS):
        with audit.step() as step:
            state, chances, length = torch.randn(1, WIDTH), [], 0
            while length < 6:
                choice = torch.distributions.Categorical(logits=policy(state))
                action = choice.sample()
                chances.append(choice.log_prob(action))
                state, length = state.roll(1, -1), length + 1
                if int(action) == 1 and length > 1:
                    break
            loss = -torch.cat(chances).sum() * length
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [policy]


def dqn(audit: Audit) -> list[nn.Module]:
    """DQN: acting without gradients, a replayed batch, a target network copied now and then."""
    model = mlp(WIDTH, 12, 3)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        with audit.step() as step:
            with torch.no_grad():
                model(torch.randn(1, WIDTH)).argmax()
            state, after, reward = torch.randn(6, WIDTH), torch.randn(6, WIDTH), torch.randn(6)
            with torch.no_grad():
                wanted = reward + 0.9 * target(after).amax(1)
            loss = functional.smooth_l1_loss(model(state)[:, 0], wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 3:
                target.load_state_dict(model.state_dict())
            step.log(loss=loss)
    return [model, target]


class Autoencoder(nn.Module):
    """A variational autoencoder that returns what its loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 12, 6), mlp(3, 12, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + spread.exp() * torch.randn_like(mean)), mean, spread


def vae(audit: Audit) -> list[nn.Module]:
    """A variational autoencoder: three outputs, the loss in the loop."""
    model = Autoencoder()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x) as step:
            made, mean, spread = model(x)
            loss = functional.mse_loss(made, x) + (mean.square() + (2 * spread).exp() - 2 * spread).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.first, self.last = nn.Linear(1, 6), nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(noisy) + self.time(time[:, None])[..., None, None]).relu())


def diffusion(audit: Audit) -> list[nn.Module]:
    """Diffusion: random times, the noise as target, an average of the weights beside."""
    model = Denoiser()
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        images = torch.randn(3, 3, 8, 8)
        with audit.step(images) as step:
            time, noise = torch.rand(3), torch.randn_like(images)
            noisy = (1 - time)[:, None, None, None] * images + time[:, None, None, None] * noise
            loss = functional.mse_loss(model(noisy, time), noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, weight in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(weight, 0.1)
            step.log(loss=loss)
    return [model, average]


def diffusion_with_self_conditioning(audit: Audit) -> list[nn.Module]:
    """Self-conditioning: on half of the steps, by chance, the model is called once more without gradients."""
    model = Denoiser()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        images = torch.randn(3, 3, 8, 8)
        with audit.step(images):
            time = torch.rand(3)
            guess = torch.zeros_like(images)
            if torch.rand(()) < 0.5:
                with torch.no_grad():
                    guess = model(images, time)
            functional.mse_loss(model(images + 0.1 * guess, time), images).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def adversarial_training(audit: Audit) -> list[nn.Module]:
    """PGD: three gradient steps on the input, then one on the weights."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(5, WIDTH), torch.randint(0, 4, (5,))
        with audit.step((x, y)) as step:
            moved = torch.zeros_like(x)
            for _ in range(3):
                moved.requires_grad_()
                (slope,) = torch.autograd.grad(functional.cross_entropy(model(x + moved), y), moved)
                moved = (moved + 0.1 * slope.sign()).detach()
            loss = functional.cross_entropy(model(x + moved), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def physics_informed(audit: Audit) -> list[nn.Module]:
    """A network whose second derivatives with respect to its input are the loss."""
    model = mlp(2, 10, 1)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.rand(6, 2).requires_grad_()
        with audit.step(x) as step:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            loss = (curve[:, 0] + slope[:, 1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]
