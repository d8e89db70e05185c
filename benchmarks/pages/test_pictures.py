"""The pictures of README and docs show what today's code shows of the recorded runs."""

import json

import pytest

from pages.redraw import NAMES, SHOWN, digest, shown


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_not_older_than_what_it_shows(name):
    assert digest(shown(name)) == json.loads(SHOWN.read_text())[name], "run: make redraw"
