"""Shell completion: the script that a shell reads, and where it is installed."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from flopwatch.errors import InputError

_SHELLS = ("bash", "zsh", "fish")


def show(app: click.Command) -> None:
    click.echo(_script(app, _shell()))


def install(app: click.Command) -> None:
    shell = _shell()
    folder, file, line = {
        "bash": (".bash_completions", ".bashrc", "source ~/.bash_completions/flopwatch.bash"),
        "zsh": (".zfunc", ".zshrc", "autoload -Uz compinit; compinit; source ~/.zfunc/flopwatch.zsh"),
        "fish": (".config/fish/completions", None, ""),
    }[shell]
    target = Path.home() / folder / f"flopwatch.{shell}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_script(app, shell), encoding="utf-8")
    if file is not None:
        start = Path.home() / file
        if line not in (start.read_text(encoding="utf-8") if start.exists() else ""):
            with start.open("a", encoding="utf-8") as stream:
                stream.write(f"\n{line}\n")
    click.secho(f"{shell} completion installed in {target}", fg="green")
    click.echo("Completion will take effect once you restart the terminal")


def _script(app: click.Command, shell: str) -> str:
    completion = get_completion_class(shell)
    assert completion is not None
    return completion(app, {}, "flopwatch", "_FLOPWATCH_COMPLETE").source()


def _shell() -> str:
    """The shell that started this process, or else the user's login shell."""
    parent = Path(f"/proc/{os.getppid()}/comm")
    names = [parent.read_text().strip() if parent.exists() else "", Path(os.environ.get("SHELL", "")).name]
    for name in names:
        if name in _SHELLS:
            return name
    raise InputError(f"completion is for {', '.join(_SHELLS)}; the shell here is {' or '.join(filter(None, names))!r}")
