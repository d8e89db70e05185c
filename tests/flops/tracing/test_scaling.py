"""How much of a product the documents of a padded batch need."""

import pytest

from flopwatch.flops.tracing.scaling import Axes, Product, RowLengths, needed_flops, scale_of

AXES = Axes(3, (8,))
ANGLES = Product("bmm", ((1, 4, 1), (1, 1, 8)), (False, False))
"""Of rotary embeddings in transformers 4: frequencies times positions, once for all rows."""
FLOPS = 2 * 4 * 8


def test_a_product_that_all_rows_share_is_needed_once_at_the_length_of_the_longest():
    rows = RowLengths(AXES, (12,), {(0, 0): 50}, 3, longest=(6,))

    assert needed_flops({scale_of(ANGLES, AXES): FLOPS}, [rows]) == (FLOPS * 6 // 8, True)


def test_it_is_unclear_if_the_longest_is_not_known():
    packed = RowLengths(AXES, (12,), {(0, 0): 50}, 3)

    assert needed_flops({scale_of(ANGLES, AXES): FLOPS}, [packed]) == (FLOPS, False)


def test_a_product_with_a_group_for_each_row_follows_the_positions():
    rows = RowLengths(AXES, (12,), {(0, 0): 50}, 3, longest=(6,))
    of_rows = Product("bmm", ((3, 4, 1), (3, 1, 8)), (False, False))

    assert needed_flops({scale_of(of_rows, AXES): 3 * FLOPS}, [rows]) == (3 * FLOPS * 12 // 24, True)


@pytest.mark.parametrize("shapes", [((1, 24, 8), (1, 8, 5)), ((1, 24, 5), (1, 5, 8)), ((3, 8, 5), (3, 5, 8))])
def test_the_width_of_a_weight_is_no_length_even_if_it_is_equal_to_one(shapes):
    """As torch.einsum makes them: all positions times a weight, in one group or in one for each row."""
    product = Product("bmm", shapes, (False, True))

    assert scale_of(product, AXES).kind == "positions"


def test_two_weights_depend_on_no_length():
    latents = Product("bmm", ((1, 5, 8), (1, 8, 12)), (True, True))

    assert scale_of(latents, AXES).kind == "fixed"
