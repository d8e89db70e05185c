"""`flopwatch selftest` as a user runs it."""

import subprocess
import sys

import pytest

from flopwatch.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.requirement("R8")]


@pytest.mark.slow
def test_it_passes_here():
    done = subprocess.run([sys.executable, "-m", "flopwatch", "selftest"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:4] for line in done.stdout.splitlines()] == ["ok  "] * 3
    assert "bitwise equal" in done.stdout


def test_a_wrong_count_is_found(monkeypatch, capsys):
    from flopwatch.cli import selftest_checks
    from flopwatch.records import flops as records

    wrong = records.FlopCount(1, 1, 1, 0, 0, method="trace", attention="full")
    monkeypatch.setattr(selftest_checks, "count_flops", lambda *_, **__: wrong)
    with pytest.raises(SystemExit) as end:
        main(["selftest"])
    assert end.value.code == 1
    assert "FAIL  FLOPs of a known layer: 1 counted" in capsys.readouterr().out
