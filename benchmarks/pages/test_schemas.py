"""The schemas in the package are those that the command writes; tests/cli/test_schemas.py checks real files."""

import pytest

from pages.schemas import KINDS, SCHEMAS, schema_text


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_as_new_as_the_dataclasses(kind):
    assert (SCHEMAS / f"{kind}.json").read_text(encoding="utf-8") == schema_text(kind), "run: make pages"


def test_the_folder_holds_the_schemas_and_nothing_else():
    assert {file.stem for file in SCHEMAS.iterdir()} == KINDS.keys()
