import flopwatch


def test_every_public_name_can_be_resolved_and_nothing_else_is_public():
    resolved = {name: getattr(flopwatch, name) for name in flopwatch.__all__}
    assert None not in resolved.values()
    assert set(flopwatch.__all__) == {*flopwatch._HOME, "__version__"}
    assert dir(flopwatch) == sorted(flopwatch.__all__)
