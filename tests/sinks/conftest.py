import os

import pytest

from support.sinks.servers import mlflow_server


@pytest.fixture(autouse=True)
def untouched_by_this_machine(monkeypatch, tmp_path):
    """Neither the developer's accounts, servers nor terminal may decide a test, and nothing may leave the machine."""
    for name in ("WANDB_PROJECT", "WANDB_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb-cache"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "COLUMNS": "80",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # `mlflow.set_experiment` sets it for child processes, and leaves it


@pytest.fixture(scope="session")
def mlflow_address(tmp_path_factory):
    """A real MLflow server for all tests that do no harm to it."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as (address, _):
        yield address
