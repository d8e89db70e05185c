"""The built files hold what they should, and PyPI accepts them. `make release-check` also installs them."""

import zipfile
from pathlib import Path

import pytest

from release.contents import build, sdist_problems, twine_check, version_problems, wheel_problems


@pytest.mark.slow
def test_wheel_and_sdist_are_complete_and_have_nothing_else(tmp_path: Path) -> None:
    wheel, sdist = build(tmp_path / "dist")
    assert [*wheel_problems(wheel), *sdist_problems(sdist), *version_problems(wheel)] == []
    twine_check(wheel, sdist)


def test_a_wheel_with_a_missing_and_a_strange_file_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / "flopwatch-0.0.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tests/test_x.py", "")
        archive.writestr("flopwatch/__init__.py", "")
    problems = wheel_problems(wheel)
    assert "the wheel should not have tests/test_x.py" in problems
    assert "the wheel lacks flopwatch/py.typed" in problems
    assert "the wheel lacks LICENSE" in problems
    assert any("is not version" in problem for problem in version_problems(wheel))
