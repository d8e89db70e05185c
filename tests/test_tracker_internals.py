"""A release of a tracker that lacks a private name costs what the name was for, and nothing of the training's."""

from types import SimpleNamespace

import pytest

from flopwatch.errors import FlopwatchError
from flopwatch.library_internals import latest_mlflow_run, wandb_run_hider


def test_a_wandb_that_cannot_hide_a_run_is_refused_before_a_run_is_started():
    old = SimpleNamespace(setup=lambda: SimpleNamespace(), __version__="0.99")
    with pytest.raises(FlopwatchError, match=r"wandb 0\.99 cannot keep the run of flopwatch apart"):
        wandb_run_hider(old)


@pytest.mark.slow
def test_an_mlflow_that_does_not_know_the_runs_of_other_threads_is_asked_for_those_of_this_one(monkeypatch):
    mlflow, fluent = pytest.importorskip("mlflow"), pytest.importorskip("mlflow.tracking.fluent")
    monkeypatch.delattr(fluent, "_get_latest_active_run")
    monkeypatch.setattr(mlflow, "active_run", lambda: "of this thread")

    assert latest_mlflow_run(mlflow) == "of this thread"
