"""Formulas that are fitted to counts."""

import pytest

from flopwatch.flops.live_formula import PREDICTIONS, FormulaFit


def linear(batch, width=8):
    return 6 * batch * width * width


def attention(batch, length):
    return batch * (1000 * length + 32 * length**2)


def fitted(cost, sizes):
    """A fit of steps that call one module with these sizes."""
    fit = FormulaFit()
    for each in sizes:
        fit.add([("model", each)], {"flops": cost(*each)})
    return fit


def value(fit, *sizes):
    values = fit.formula.values([("model", sizes)])
    return None if values is None else values["flops"]


def test_a_cost_that_is_linear_in_the_batch_is_found():
    fit = fitted(linear, [(2,), (9,), (4,), (7,)])

    assert [value(fit, batch) for batch in (3, 5, 8)] == [linear(3), linear(5), linear(8)]


def test_a_cost_that_is_quadratic_in_the_length_is_found():
    fit = fitted(attention, [(1, 10), (8, 80), (3, 20), (4, 40), (2, 33), (7, 71), (5, 50)])

    assert value(fit, 6, 61) == attention(6, 61)


def test_a_formula_is_not_believed_before_it_has_predicted_two_counts():
    fit = fitted(linear, [(2,), (9,), (4,)])
    assert fit.formula is None, "two counts determine a line, and one more was predicted"

    fit.add([("model", (6,))], {"flops": linear(6)})
    assert fit.formula.counts == 2 + PREDICTIONS


@pytest.mark.parametrize("batch", [1, 10])
def test_nothing_is_said_about_sizes_outside_of_the_counted_ones(batch):
    assert value(fitted(linear, [(2,), (9,), (4,), (7,)]), batch) is None


def test_nothing_is_said_about_a_fixed_size_that_changes():
    fit = fitted(linear, [(2, 8), (9, 8), (4, 8), (7, 8)])

    assert value(fit, 5, 8) == linear(5)
    assert value(fit, 5, 9) is None


def test_nothing_is_said_about_two_sizes_that_were_always_equal_and_differ_now():
    fit = fitted(lambda batch, _: linear(batch), [(2, 2), (9, 9), (4, 4), (7, 7)])

    assert value(fit, 5, 5) == linear(5)
    assert value(fit, 5, 6) is None


def test_calls_of_one_module_add_up():
    fit = FormulaFit()
    for sizes in [(2, 3), (9, 2), (4, 5), (7, 8), (3, 3)]:
        fit.add([("model", (size,)) for size in sizes], {"flops": sum(map(linear, sizes))})

    assert fit.formula.values([("model", (4,)), ("model", (6,))])["flops"] == linear(10)


def test_a_model_and_its_teacher_have_each_their_part():
    fit = FormulaFit()
    for own, other in [(2, 30), (9, 10), (4, 22), (7, 28), (3, 12), (8, 17)]:
        fit.add([("model", (own,)), ("teacher", (other,))], {"flops": linear(own) + 5 * other})

    assert fit.formula.values([("model", (5,)), ("teacher", (20,))])["flops"] == linear(5) + 100


def test_a_length_that_is_rounded_up_to_a_multiple_is_found():
    def cost(length):
        return 100 * (-(-length // 8) * 8)

    fit = fitted(cost, [(length,) for length in (3, 64, 9, 17, 33, 40, 50, 58)])

    assert [value(fit, length) for length in (10, 16, 23, 57)] == [cost(length) for length in (10, 16, 23, 57)]


def test_a_cost_that_follows_no_formula_has_none():
    fit = fitted(lambda batch: hash(str(batch) * 3) % 10_000, [(batch,) for batch in range(1, 49)])

    assert fit.formula is None


def test_a_count_that_contradicts_a_formula_ends_it():
    fit = fitted(linear, [(2,), (9,), (4,), (7,)])
    fit.add([("model", (6,))], {"flops": linear(6) + 1})

    assert fit.formula is None


def test_a_formula_that_would_give_a_part_of_a_flop_gives_nothing():
    fit = fitted(
        lambda batch: batch * (batch - 1) // 2 if batch % 2 else batch // 2 * (batch - 1),
        [(2,), (20,), (4,), (7,), (12,)],
    )
    assert value(fit, 9) == 36

    halves = fitted(lambda batch: batch // 2, [(2,), (20,), (4,), (8,), (12,)])
    assert value(halves, 9) is None


def test_a_formula_gives_what_was_counted_or_says_so():
    formula = fitted(linear, [(2,), (9,), (4,), (7,)]).formula

    assert formula.gives([("model", (5,))], {"flops": linear(5)})
    assert not formula.gives([("model", (5,))], {"flops": linear(5) + 1})
    assert not formula.gives([("model", (5,))], {"flops": linear(5), "of another type": 3})
    assert formula.covers("model", (5,))
    assert not formula.covers("model", (50,))
