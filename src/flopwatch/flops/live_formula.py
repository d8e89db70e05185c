"""Fits formulas for the FLOPs of steps to live counts alone, in exact arithmetic.

A step calls modules; each call has sizes. What a step costs is a sum over its calls of a polynomial in the sizes of
each call. The polynomial is unknown, so the smallest of a few kinds of polynomials is taken that gives every count to
the FLOP. It is believed when it has predicted further counts, and inside the sizes of the counted calls only. The
number of operations that autograd recorded is predicted too, and every step shows its own: where that differs, the
formula does not hold.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from operator import add, mul

from flopwatch.flops.tracing.scaling import Scale

PREDICTIONS = 2
_MOST_COUNTS, _MOST_VARIABLES = 48, 3
_STRIDES = (2, 4, 8, 16, 32, 64, 128)
_TRIED_AGAIN_AT = (8, 12, 16, 24, 32, 48)
"""Without a formula, later attempts are made with so many counts only. They also try sizes that are rounded to a
multiple, which takes longer."""
_FEW_TERMS = 4

Calls = Sequence[tuple[Hashable, tuple[int, ...]]]
"""The calls of a step: what is called, and the sizes of the arguments."""
Exponents = tuple[int, ...]
Rounding = tuple[int, int, int] | None
"""Which variable is rounded, to a multiple of what, and 1 for up or 0 for down."""


@dataclass(frozen=True)
class _Variables:
    """The sizes of one family of calls that vary. Sizes that are always equal are one variable."""

    places: tuple[int, ...]
    equal: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, int], ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    def values(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        if any(sizes[place] != value for place, value in self.fixed):
            return None
        if any(sizes[place] != sizes[other] for place, other in self.equal):
            return None
        values = tuple(sizes[place] for place in self.places)
        in_range = all(low <= value <= high for low, value, high in zip(self.low, values, self.high, strict=True))
        return values if in_range else None


def _variables(sizes: Sequence[tuple[int, ...]]) -> _Variables:
    columns: dict[tuple[int, ...], int] = {}
    equal, fixed = [], []
    for place, column in enumerate(zip(*sizes, strict=True)):
        if len(set(column)) == 1:
            fixed.append((place, column[0]))
        elif column in columns:
            equal.append((place, columns[column]))
        else:
            columns[column] = place
    return _Variables(
        tuple(columns.values()), tuple(equal), tuple(fixed), tuple(map(min, columns)), tuple(map(max, columns))
    )


def _bases(variables: int) -> Iterator[list[Exponents]]:
    """Sets of monomials, small ones first. In most models one variable is the batch, and its degree is one."""
    if variables == 0:
        yield [()]
    elif variables == 1:
        for degree in (1, 2, 3):
            yield [(power,) for power in range(degree + 1)]
    else:
        for degree in (1, 2):
            for batch in range(variables):
                rest = [e for e in product(range(degree + 1), repeat=variables) if e[batch] == 0 and sum(e) <= degree]
                yield [(0,) * variables, *(_with(each, batch) for each in rest)]
        for batch in range(variables if variables > 2 else 0):  # images: patches, and pairs of patches
            areas = [tuple(0 if place == batch else power for place in range(variables)) for power in range(3)]
            yield [(0,) * variables, *(_with(each, batch) for each in areas)]
        for degree in (2, 3):
            yield [e for e in product(range(degree + 1), repeat=variables) if sum(e) <= degree]


def _with(exponents: Exponents, place: int) -> Exponents:
    return tuple(power + (index == place) for index, power in enumerate(exponents))


@dataclass(frozen=True)
class _Family:
    variables: _Variables
    basis: Sequence[Exponents]
    rounding: Rounding

    def terms(self, sizes: tuple[int, ...]) -> list[int] | None:
        values = self.variables.values(sizes)
        if values is None:
            return None
        if self.rounding is not None:
            place, stride, up = self.rounding
            values = (*values[:place], (values[place] + up * (stride - 1)) // stride, *values[place + 1 :])
        return [prod(map(pow, values, exponents)) for exponents in self.basis]


def _features(calls: Calls, families: Mapping[Hashable, _Family]) -> list[int] | None:
    sums = {family: [0] * len(own.basis) for family, own in families.items()}
    for family, sizes in calls:
        terms = families[family].terms(sizes)
        if terms is None:
            return None
        sums[family] = list(map(add, sums[family], terms))
    return [value for own in sums.values() for value in own]


@dataclass(frozen=True)
class Formula:
    """A formula that gives all `counts` it was fitted to, and predicted at least `PREDICTIONS` of them."""

    counts: int
    _families: Mapping[Hashable, _Family]
    _relations: Sequence[tuple[int, Sequence[Fraction]]]
    _pivots: Sequence[int]
    _coefficients: Mapping[Hashable, Sequence[Fraction]]
    _most_calls: int

    def values(self, calls: Calls) -> dict[Hashable, int] | None:
        """What a step with these calls costs, by output; None if it is not inside the verified sizes."""
        if {family for family, _ in calls} != self._families.keys() or len(calls) > self._most_calls:
            return None
        row = _features(calls, self._families)
        if row is None:
            return None
        known = [row[pivot] for pivot in self._pivots]
        if any(row[place] != sum(map(mul, factors, known)) for place, factors in self._relations):
            return None
        result = {name: sum(map(mul, factors, known)) for name, factors in self._coefficients.items()}
        if any(Fraction(value).denominator != 1 or value < 0 for value in result.values()):
            return None
        return {name: int(value) for name, value in result.items()}

    def gives(self, calls: Calls, outputs: Mapping[Hashable, int]) -> bool:
        values = self.values(calls)
        return values is not None and all(
            outputs.get(name, 0) == values.get(name, 0)
            for name in {*values, *outputs}
            if name in values or not isinstance(name, Scale)
        )

    def covers(self, family: Hashable, sizes: tuple[int, ...]) -> bool:
        return family in self._families and self._families[family].variables.values(sizes) is not None


def divided_calls(calls: Calls, parts: int) -> list[Calls] | None:
    """The calls of each of the equal parts of a step, such as its micro-batches; None if they are not divided so.

    >>> divided_calls([("model", (4, 7)), ("loss", (4,)), ("model", (4, 9)), ("loss", (4,))], 2)
    [[('model', (4, 7)), ('loss', (4,))], [('model', (4, 9)), ('loss', (4,))]]
    """
    families: dict[Hashable, list[tuple[int, ...]]] = {}
    for family, sizes in calls:
        families.setdefault(family, []).append(sizes)
    if any(len(own) % parts for own in families.values()):
        return None
    chunks = {family: len(own) // parts for family, own in families.items()}
    return [
        [(family, sizes) for family, n in chunks.items() for sizes in families[family][part * n : (part + 1) * n]]
        for part in range(parts)
    ]


class FormulaFit:
    """The live counts of steps that call the same modules, and the formula that they determine and verify, or None."""

    def __init__(self) -> None:
        self.formula: Formula | None = None
        self._counts: dict[Hashable, tuple[Calls, Mapping[Hashable, int]]] = {}

    def add(self, calls: Calls, outputs: Mapping[Hashable, int]) -> None:
        """Add a count. `outputs` are the FLOPs, by phase, type and so on, and other numbers to predict."""
        self._counts.pop(key := tuple(calls), None)
        self._counts[key] = calls, outputs
        if len(self._counts) > _MOST_COUNTS:
            self._counts.pop(next(iter(self._counts)))
        if self.formula is not None and self.formula.gives(calls, outputs):
            return
        if self.formula is not None or len(self._counts) < _TRIED_AGAIN_AT[1] or len(self._counts) in _TRIED_AGAIN_AT:
            self.formula = self._fitted()

    def _fitted(self) -> Formula | None:
        counts = list(self._counts.values())
        families = tuple(dict.fromkeys(family for calls, _ in counts for family, _ in calls))
        if any({family for family, _ in calls} != set(families) for calls, _ in counts) or len(counts) <= PREDICTIONS:
            return None
        sizes = {family: [own for calls, _ in counts for each, own in calls if each == family] for family in families}
        if any(len({len(own) for own in sizes[family]}) > 1 for family in families):
            return None
        variables = {family: _variables(sizes[family]) for family in families}
        if any(len(each.places) > _MOST_VARIABLES for each in variables.values()):
            return None
        kinds = {family: list(_bases(len(variables[family].places))) for family in families}
        roundings: list[Mapping[Hashable, Rounding]] = [{}]
        if len(counts) in _TRIED_AGAIN_AT and len(variables) <= 2:
            for family, own in variables.items():
                ways = product(range(len(own.places)), _STRIDES, (1, 0))
                roundings += [{family: (place, stride, up)} for place, stride, up in ways]
        for rounding in roundings:
            # Bases of one size for all families: a model and its teacher are polynomials of the same kind.
            for number in range(max(map(len, kinds.values()), default=0)):
                tried = {
                    family: _Family(variables[family], bases[min(number, len(bases) - 1)], rounding.get(family))
                    for family, bases in kinds.items()
                }
                if rounding and max(len(own.basis) for own in tried.values()) > _FEW_TERMS:
                    break
                if (found := _solved(counts, tried)) is not None:
                    return found
        return None


def _solved(
    counts: Sequence[tuple[Calls, Mapping[Hashable, int]]], families: Mapping[Hashable, _Family]
) -> Formula | None:
    """Solve for the coefficients; None if a count is not given by them, or too few counts are left to verify them."""
    names = list(dict.fromkeys(name for _, outputs in counts for name in outputs))
    rows = [_features(calls, families) for calls, _ in counts]
    if any(row is None for row in rows):
        return None
    features: list[list[int]] = [row for row in rows if row is not None]
    pivots, relations = _independent(features)
    if len(counts) < len(pivots) + PREDICTIONS:
        return None
    independent = [[row[pivot] for pivot in pivots] for row in features]
    coefficients: dict[Hashable, list[Fraction]] = {}
    for name in names:
        solution = solve(independent, [outputs.get(name, 0) for _, outputs in counts])
        if solution is not None:
            coefficients[name] = solution
        elif not isinstance(name, Scale):  # how FLOPs depend on padding may stay unknown
            return None
    most = max(len(calls) for calls, _ in counts)
    return Formula(len(counts), families, relations, pivots, coefficients, most)


def _independent(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, list[Fraction]]]]:
    """Columns that are independent in these rows, and for each other column its factors as their sum."""
    pivots: list[int] = []
    relations: list[tuple[int, list[Fraction]]] = []
    for place in range(len(rows[0])):
        found = solve([[row[pivot] for pivot in pivots] for row in rows], [row[place] for row in rows])
        if found is None:
            pivots.append(place)
        else:
            relations.append((place, found))
    return pivots, [(place, [*factors, *[Fraction(0)] * (len(pivots) - len(factors))]) for place, factors in relations]


def solve(matrix: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Solve a system of equations exactly, by elimination in rational numbers; None if it has not just one solution.

    >>> solve([[1, 1], [1, 2], [1, 3]], [3, 5, 7])
    [Fraction(1, 1), Fraction(2, 1)]
    """
    rows = [[Fraction(x) for x in (*row, value)] for row, value in zip(matrix, values, strict=True)]
    unknowns = len(matrix[0])
    for column in range(unknowns):
        pivot = next((index for index in range(column, len(rows)) if rows[index][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column][column]
        rows[column] = [x / head for x in rows[column]]
        for index, row in enumerate(rows):
            if index != column and row[column]:
                factor = row[column]
                rows[index] = [x - factor * y for x, y in zip(row, rows[column], strict=True)]
    return None if any(row[-1] for row in rows[unknowns:]) else [row[-1] for row in rows[:unknowns]]
