"""Runs in a fresh environment: the public names, the part of each extra that is installed, the message of the others.

    python -I inside.py EXTRA     # EXTRA is "core" or the one extra that was installed

Prints one line per check, `ok` or `FAIL` first, and needs nothing but flopwatch.
"""

import os
import re
import socket
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory


def check_names() -> None:
    """Every public name of flopwatch and of its sub-packages can be imported from the installed wheel."""
    import flopwatch

    assert Path(flopwatch.__file__).is_relative_to(sys.prefix), flopwatch.__file__
    assert flopwatch.__version__ == metadata.version("flopwatch")
    for name in flopwatch.__all__:
        found = getattr(flopwatch, name)
        for inner in getattr(found, "__all__", []):
            getattr(found, inner)


def open_sink(name: str, **options: object) -> None:
    """Train four steps with the sink, in an empty folder; raise if the sink could not be opened or failed."""
    import torch

    import flopwatch

    model = torch.nn.Linear(8, 8)
    settings = {"sinks": [name], "sink_options": {name: options}} if options else {"sinks": [name]}
    monitor = flopwatch.TrainingMonitor("run", config={"flopwatch": settings}, model=model, peak_flops_per_s=1e12)
    with monitor:
        for _ in range(4):
            with monitor.step(batch := torch.randn(2, 8)):
                model(batch).sum().backward()
    failed = monitor.summary.failed_parts if monitor.summary else {"the monitor": "it has no summary"}
    if failed:
        raise RuntimeError("; ".join(failed.values()))


def open_prometheus() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    open_sink("prometheus", port=port)


def use_transformers() -> None:
    import_module("flopwatch.integrations.hugging_face").FlopwatchCallback()
    Path("config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, '
        '"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}'
    )
    import flopwatch

    flopwatch.load_model("config.json", device="cpu")


def use_lightning() -> None:
    import_module("flopwatch.integrations.lightning").FlopwatchCallback()


def use_opacus() -> None:
    privacy = import_module("flopwatch.sweep.trainers.privacy")
    spent = privacy.privacy_spent({"dataset_size": 1000, "epochs": 1, "delta": 1e-5, "accountant": "rdp"}, 10, 1.0)
    if spent.epsilon is None:
        raise RuntimeError(str(spent))


def use_ray() -> None:
    import_module("flopwatch.optional").require("ray", "ray")


def use_nvml() -> None:
    import_module("flopwatch.optional").require("pynvml", "nvml")


PARTS: dict[str, tuple[str, Callable[[], None]]] = {
    "tensorboard": ("tensorboard", lambda: open_sink("tensorboard")),
    "wandb": ("wandb", lambda: open_sink("wandb")),
    "mlflow": ("mlflow", lambda: open_sink("mlflow")),
    "prometheus": ("prometheus_client", open_prometheus),
    "hf": ("transformers", use_transformers),
    "lightning": ("lightning", use_lightning),
    "dp": ("opacus", use_opacus),
    "ray": ("ray", use_ray),
    "nvml": ("pynvml", use_nvml),
}
"""For each extra, the package that it installs, and a function that uses its part of flopwatch."""


def check_part(extra: str, *, must_be_installed: bool) -> None:
    """The part works if its package is installed; otherwise one line says which extra to install."""
    package, use = PARTS[extra]
    is_installed = find_spec(package) is not None
    if is_installed or must_be_installed:
        use()
        return
    try:
        use()
    except Exception as error:
        message = str(error)
        remedy = rf'pip install "flopwatch\[{extra}\]"'
        assert re.search(remedy, message), f"the message has no {remedy}: {message}"
        assert "\n" not in message, f"the message has several lines: {message}"
    else:
        raise AssertionError("no error, although the package is not installed")


# The extra installs mlflow-skinny, which has no sqlite store and refuses the file store without this permission. Users
# of the extra log to a server, or install the whole `mlflow`.
LOCAL_SERVICES = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}


def main() -> int:
    extra = sys.argv[1]
    checks: dict[str, Callable[[], None]] = {"names": check_names}
    for name in PARTS:
        checks[name] = lambda name=name: check_part(name, must_be_installed=name == extra)  # type: ignore[misc]
    failed = 0
    for name, check in checks.items():
        try:
            with TemporaryDirectory() as folder:
                os.chdir(folder)
                os.environ.update(LOCAL_SERVICES, MLFLOW_TRACKING_URI=f"file://{folder}/mlruns")
                check()
                os.chdir("/")
            sys.stdout.write(f"ok {name}\n")
        except BaseException as error:
            failed += 1
            sys.stdout.write(f"FAIL {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
