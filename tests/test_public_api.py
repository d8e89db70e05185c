"""The public names: all resolve, each lives where its package says, and importing packages loads nothing heavy."""

import pytest

import flopwatch

PACKAGES = ("flops", "hardware", "models", "monitor", "records", "report", "runs", "sinks", "sweep")


def test_every_public_name_can_be_resolved_and_nothing_else_is_public():
    resolved = {name: getattr(flopwatch, name) for name in flopwatch.__all__}
    assert None not in resolved.values()
    assert set(flopwatch.__all__) == {*flopwatch._HOMES, "__version__"}
    assert dir(flopwatch) == sorted(flopwatch.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'count_flop'"):
        flopwatch.count_flop  # noqa: B018


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_a_package_lists_is_there(name):
    package = getattr(flopwatch, name)
    assert package.__doc__
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name.isupper(), name))
    for public in package.__all__:
        assert getattr(package, public) is not None
