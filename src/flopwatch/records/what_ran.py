"""What ran: the git commit of a folder, and the arguments of a command without secrets. Standard library only.

The commit is asked in a way that can neither hang nor change anything. A value is hidden if its name says that it is a
secret, such as `--api-key=...`, or if it looks like a key of a known service. An argument that is hidden by mistake
costs less than a secret in a log.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

_TIMEOUT_SECONDS = 2.0
_COMMAND = (
    *("--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch"),
    *("--untracked-files=no", "--ignore-submodules=dirty"),
)
"""No lock is taken, so a commit of the user at the same time does not fail; no program of the repository is started."""


def git_state(folder: str) -> dict[str, Any] | None:
    """The commit of a folder and whether files that git knows were changed since; None if git does not tell it in time.

    Asked in a thread of its own: on a file system that hangs, a process that was killed does not end, and waiting for
    it would hang too.
    """
    if not hasattr(os, "fork") or not hasattr(os, "WNOHANG"):  # as on Windows
        return None
    from threading import Thread

    found: list[dict[str, Any]] = []
    thread = Thread(target=lambda: found.extend(_ask(folder)), name="flopwatch-git", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_SECONDS + 0.5)
    return found[0] if found else None


def _ask(folder: str) -> list[dict[str, Any]]:
    import subprocess

    try:
        done = subprocess.run(
            ["git", "-C", folder, *_COMMAND],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    facts = dict(line[2:].split(" ", 1) for line in done.stdout.splitlines() if line.startswith("# branch."))
    commit = facts.get("branch.oid", "(initial)")
    if done.returncode != 0 or commit == "(initial)":
        return []
    is_dirty = any(not line.startswith("#") for line in done.stdout.splitlines())
    return [{"commit": commit, "branch": facts.get("branch.head"), "dirty": is_dirty}]


HIDDEN = "***"

_SECRET_WORDS = frozenset(
    {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "bearer"}
)
_LAST_WORDS = frozenset({"token", "key", "auth", "authorization", "cookie"})
"""Secret if they are the last word of a name: `token_id` and `key_dim` are none."""
_ORDINARY = re.compile(
    r"pad|eos|bos|mask|cls|sep|unk|special|image|audio|video|start|end|stop|per|next|prompt|decoder|"
    r"think|new|separator|task|class|sort|text|label|input|output|column|primary|foreign|group|metric|"
    r"loss|index|response|answer|question|data|dataset|batch|cache|num|query"
)
"""Before `token` and `key`, these words make an ordinary name: `pad_token`, `text_key`."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_NAMED = re.compile(r"""([A-Za-z_][\w.-]*)(["']?(?::\s*|\s*=\s*)["']?(?:Bearer\s+|Basic\s+)?)(?=([^\s"',;&}]+))""")
"""A name, what separates it from its value, and the value, which may have names of its own."""
_KEYS = re.compile(
    r"""\b(?:
        hf_[A-Za-z0-9]{8,} | (?:sk|rk|pk)[-_][A-Za-z0-9_-]{8,} | gh[pousr]_[A-Za-z0-9]{8,} | github_pat_\w{8,}
        | glpat-[\w-]{8,} | xox[abeoprs]-[\w-]{8,} | (?:AKIA|ASIA)[A-Z0-9]{12,} | AIza[\w-]{20,} | ya29\.[\w.-]{8,}
        | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{20,} | dop_v1_\w{20,} | r8_[A-Za-z0-9]{20,} | nvapi-[\w-]{20,}
        | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?
    )""",
    re.VERBOSE,
)
_IN_URLS = re.compile(r"(?<=://)[^/\s@]+@")
_WEBHOOKS = re.compile(r"(?<=hooks\.slack\.com/services/)\S+|(?<=discord\.com/api/webhooks/)\S+")


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name is a secret.

    >>> [is_secret_name(name) for name in ("--api-key", "hf_token", "DB_PASSWORD", "wandb.apiKey")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("--tokenizer", "--max-tokens", "pad_token", "token_id", "sort_key")]
    [False, False, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    if _SECRET_WORDS.intersection(words) or words[-2:] == ["api", "keys"]:
        return True
    return words[-1] in _LAST_WORDS and not any(map(_ORDINARY.fullmatch, words[-2:-1]))


def mask_text(text: str) -> str:
    """The text without what looks like a secret.

    >>> mask_text("postgres://me:hunter2@db/runs?sslkey=a"), mask_text('{"api_key": "abc", "lr": 3}')
    ('postgres://***@db/runs?sslkey=a', '{"api_key": "***", "lr": 3}')
    """
    text = _IN_URLS.sub(f"{HIDDEN}@", text)
    text = _WEBHOOKS.sub(HIDDEN, text)
    text = _KEYS.sub(HIDDEN, text)
    kept, done = "", 0
    for found in _NAMED.finditer(text):
        if found.start() >= done and is_secret_name(found[1]):
            kept += text[done : found.end()] + HIDDEN
            done = found.end(3)
    return kept + text[done:]


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets.

    >>> mask_arguments(["--lr=3e-4", "--token", "abc", "--api-key=x y", "--tokenizer", "gpt2"])
    ['--lr=3e-4', '--token', '***', '--api-key=***', '--tokenizer', 'gpt2']
    """
    masked = []
    hides_next = False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        is_flag = name.startswith("-") and not name[1:2].isdigit()
        if hides_next and not is_flag:
            masked.append(HIDDEN)
        elif sign and not re.search(r"[\s:/?{]", name) and is_secret_name(name):
            masked.append(f"{name}={HIDDEN}")
        else:
            masked.append(mask_text(argument))
        hides_next = is_flag and not sign and is_secret_name(name)
    return masked
