"""What users may call, pass, set and read changes only on purpose."""

from support.public_surface import FROZEN, ROOT, collect, to_text


def test_the_public_surface_is_the_frozen_one() -> None:
    """Every change of a name, a parameter, a flag, a key or a metric shows here, and is then a decision."""
    assert to_text(collect(ROOT)) == FROZEN.read_text(encoding="utf-8"), (
        "python -m support.public_surface --update, in tests/"
    )
