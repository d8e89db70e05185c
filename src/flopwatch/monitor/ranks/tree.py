"""Who tells whom: a tree over the ranks with the logging rank at its root."""

FAN_OUT = 8
"""Children per rank: a rank hears from at most so many, and 16,384 ranks are five levels deep."""


def parent(rank: int, root: int, world_size: int) -> int | None:
    """The rank that is told; None for the root.

    >>> parent(9, 0, 64), parent(0, 0, 64)
    (1, None)
    """
    place = (rank - root) % world_size
    return None if place == 0 else ((place - 1) // FAN_OUT + root) % world_size


def children(rank: int, root: int, world_size: int) -> list[int]:
    """The ranks that tell this one.

    >>> children(0, 0, 4), children(1, 0, 11)
    ([1, 2, 3], [9, 10])
    """
    place = (rank - root) % world_size
    first = place * FAN_OUT + 1
    return [(child + root) % world_size for child in range(first, min(first + FAN_OUT, world_size))]
