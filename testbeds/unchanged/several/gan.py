"""A generator and a discriminator with an optimizer each."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
discriminator = nn.Sequential(nn.Linear(12, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
score = nn.functional.binary_cross_entropy_with_logits
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
for _ in range(50):
    real, noise = torch.randn(16, 12) + 3, torch.randn(16, 8)
    fake = generator(noise)
    of_discriminator.zero_grad()
    loss_discriminator = score(discriminator(real), ones) + score(discriminator(fake.detach()), zeros)
    loss_discriminator.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    loss = score(discriminator(fake), ones)
    loss.backward()
    of_generator.step()
parameters = [*generator.parameters(), *discriminator.parameters()]
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()
print(f"loss {loss.item()!r}, parameters {digest}")
