"""A training for each of 19 functions that may compute other last bits while a dispatch mode is active.

`lstsq` is not among them: its own last bits differ from run to run.

`python testbeds/disturbing_ops.py NAME` trains 12 steps and prints the weights bit by bit, as a hash.
"""

import hashlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def near_identity(features: Tensor) -> Tensor:
    """Well-conditioned matrices with a gradient."""
    return torch.eye(4) + 0.1 * features[:, :16].reshape(-1, 4, 4)


def symmetric(features: Tensor) -> Tensor:
    matrices = near_identity(features)
    return matrices + matrices.transpose(-1, -2) + torch.diag(torch.arange(4.0))


def in_autocast(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(features: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(features).float()

    return run


_bilinear = nn.Bilinear(8, 8, 4).requires_grad_(False)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: (1 + 0.1 * x).prod(),
    "prod of a dimension": lambda x: (1 + 0.1 * x).view(-1, 8, 4).prod(-1),
    "cumprod": lambda x: (1 + 0.1 * x).cumprod(-1),
    "det": lambda x: torch.linalg.det(near_identity(x)),
    "torch.det": lambda x: torch.det(near_identity(x)),
    "logdet": lambda x: torch.logdet(near_identity(x)),
    "inv": lambda x: torch.linalg.inv(near_identity(x)),
    "torch.inverse": lambda x: torch.inverse(near_identity(x)),
    "inv_ex": lambda x: torch.linalg.inv_ex(near_identity(x)).inverse,
    "svd": lambda x: torch.linalg.svd(symmetric(x)).S,
    "svdvals": lambda x: torch.linalg.svdvals(symmetric(x)),
    "eigh": lambda x: torch.linalg.eigh(symmetric(x)).eigenvalues,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(symmetric(x)),
    "pinv": lambda x: torch.linalg.pinv(near_identity(x)),
    "slogdet": lambda x: torch.linalg.slogdet(near_identity(x)).logabsdet,
    "cond": lambda x: torch.linalg.cond(near_identity(x)),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(near_identity(x), "nuc"),
    "bilinear in autocast": in_autocast(lambda x: _bilinear(x[:, :8], x[:, 8:16])),
    "affine_grid in autocast": in_autocast(lambda x: F.affine_grid(x[:, :6].view(-1, 2, 3), [len(x), 1, 3, 3])),
}


AUTOCAST = tuple(name for name in FUNCTIONS if name.endswith("in autocast"))
"""The first counted step computes other last bits in the op itself, as docs/exactness.md says."""


def train(name: str, steps: int = 12) -> str:
    """Train and return a hash of the weights."""
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        loss = function(model(torch.randn(8, 16))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(train(sys.argv[1]))
