"""Eliminations cost what they cost on paper."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import flopwatch


class Counted:
    """A number that counts what is done with it; square roots count as divisions do."""

    operations = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def _done(self, value: float) -> "Counted":
        Counted.operations += 1
        return Counted(value)

    def __mul__(self, other: "Counted") -> "Counted":
        return self._done(self.value * other.value)

    def __sub__(self, other: "Counted") -> "Counted":
        return self._done(self.value - other.value)

    def __truediv__(self, other: "Counted") -> "Counted":
        return self._done(self.value / other.value)

    def root(self) -> "Counted":
        return self._done(self.value**0.5)


Matrix = list[list[Counted]]


def matrix(rows: int, columns: int) -> Matrix:
    """With a heavy diagonal, so that nothing has to be exchanged."""
    values = ((1 / (1 + row + 2 * column) + 9 * (row == column) for column in range(columns)) for row in range(rows))
    return [[Counted(value) for value in row] for row in values]


def eliminate(a: Matrix) -> None:
    rows, columns = len(a), len(a[0])
    for k in range(min(rows, columns)):
        for i in range(k + 1, rows):
            a[i][k] = a[i][k] / a[k][k]
            for j in range(k + 1, columns):
                a[i][j] = a[i][j] - a[i][k] * a[k][j]


def substitute(lu: Matrix, b: Matrix) -> None:
    order = len(lu)
    for column in range(len(b[0])):
        for i in range(order):
            for j in range(i):
                b[i][column] = b[i][column] - lu[i][j] * b[j][column]
        for i in reversed(range(order)):
            for j in range(i + 1, order):
                b[i][column] = b[i][column] - lu[i][j] * b[j][column]
            b[i][column] = b[i][column] / lu[i][i]


def factor_symmetric(a: Matrix) -> None:
    order = len(a)
    for j in range(order):
        for k in range(j):
            a[j][j] = a[j][j] - a[j][k] * a[j][k]
        a[j][j] = a[j][j].root()
        for i in range(j + 1, order):
            for k in range(j):
                a[i][j] = a[i][j] - a[i][k] * a[j][k]
            a[i][j] = a[i][j] / a[j][j]


def on_paper(work: Callable[[], None]) -> int:
    before = Counted.operations
    work()
    return Counted.operations - before


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def forward_flops(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    count = flopwatch.count_flops(Calls(function), x, training=False)
    assert (count.coverage, count.uncounted) == (1.0, ())
    return count.model_flops


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (7, 4), (4, 7)])
def test_an_elimination_costs_what_it_costs_on_paper(rows: int, columns: int) -> None:
    flops = forward_flops(lambda x: torch.linalg.lu_factor(x)[0], torch.randn(rows, columns))

    assert flops == on_paper(lambda: eliminate(matrix(rows, columns)))


def solved(order: int, right_hand_sides: int) -> int:
    def work() -> None:
        a = matrix(order, order)
        eliminate(a)
        substitute(a, matrix(order, right_hand_sides))

    return on_paper(work)


@pytest.mark.parametrize("right_hand_sides", [1, 5])
def test_a_solution_costs_an_elimination_and_two_substitutions(right_hand_sides: int) -> None:
    b = torch.randn(6, right_hand_sides)

    assert forward_flops(lambda x: torch.linalg.solve(x, b), torch.randn(6, 6)) == solved(6, right_hand_sides)
    # Two matrices in a batch, and one right-hand side that is a vector.
    assert forward_flops(lambda x: torch.linalg.solve(x, b), torch.randn(2, 6, 6)) == 2 * solved(6, right_hand_sides)
    assert forward_flops(lambda x: torch.linalg.solve(x, b[:, 0]), torch.randn(6, 6)) == solved(6, 1)


def test_an_inverse_is_the_solution_for_the_identity() -> None:
    assert forward_flops(torch.linalg.inv, torch.randn(6, 6)) == solved(6, 6)


def test_a_determinant_costs_an_elimination() -> None:
    paper = on_paper(lambda: eliminate(matrix(6, 6)))

    assert forward_flops(torch.linalg.det, torch.randn(6, 6)) == paper
    assert forward_flops(lambda x: torch.linalg.slogdet(x)[1], torch.randn(6, 6)) == paper


def test_a_symmetric_elimination_costs_half_and_its_square_roots() -> None:
    assert forward_flops(torch.linalg.cholesky, torch.eye(6)) == on_paper(lambda: factor_symmetric(matrix(6, 6)))


def test_the_gradient_of_a_solution_is_a_substitution_and_a_product() -> None:
    class Solves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(self.matrix, x)

    count = flopwatch.count_flops(Solves(), torch.randn(6, 5))

    substitutions = on_paper(lambda: substitute(matrix(6, 6), matrix(6, 5)))
    assert count.forward_flops == solved(6, 5)
    assert count.backward_flops == substitutions + 2 * 6 * 5 * 6
