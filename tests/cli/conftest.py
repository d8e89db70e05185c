import pytest


@pytest.fixture(autouse=True)
def untouched_by_this_machine(monkeypatch, tmp_path):
    """Neither the developer's override, cache nor terminal may decide a test."""
    monkeypatch.delenv("FLOPWATCH_PEAK_TFLOPS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def flopwatch(capsys):
    """Runs the command line in this process: `(exit status, stdout, stderr)`. Not `trial`, which kills its children."""
    from flopwatch.cli import main

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run
