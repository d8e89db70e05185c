"""Start a script on several gloo ranks and collect what each of them says."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from support.warm_python import TORCH, start_warm


def torchrun(script: Path, *arguments: str, ranks: int, seconds: float = 240) -> list[dict[str, Any]]:
    """The results of all ranks, in their order: each prints one line of JSON behind the word RESULT."""
    outputs = outputs_of_ranks(script, *arguments, ranks=ranks, seconds=seconds)
    results = [json.JSONDecoder().raw_decode(part)[0] for text in outputs for part in text.split("RESULT ")[1:]]
    return sorted(results, key=lambda result: result["rank"])


def outputs_of_ranks(
    script: str | Path, *arguments: str, ranks: int, seconds: float = 300, modules: tuple[str, ...] = TORCH
) -> list[str]:
    """What each rank of the script, or of this code, printed.

    The environment is the one torchrun gives; its agent and the import of torch in every rank are saved.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    job |= {"GROUP_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": 1}
    started = []
    for rank in range(ranks):
        own = {name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()}
        started.append(start_warm(script, *arguments, env={**os.environ, **own}, modules=modules))
    ended = []
    try:
        ended += [(*process.communicate(timeout=seconds), process.returncode) for process in started]
    finally:
        for process in started:
            process.end()
    # The ranks that fail because another one is gone say nothing about why it is.
    said = [f"rank {rank} ended with {code}:\n{err}" for rank, (_, err, code) in enumerate(ended)]
    assert not any(code for *_, code in ended), "\n".join(said)
    return [out for out, *_ in ended]
