"""Trials of a sweep to Weights & Biases: a run each, grouped by the sweep."""

import os
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.sinks.trial_runs import TrialRun
from flopwatch.sinks.wandb import refuse_to_prompt

_LONGEST_TAG = 64
_LONGEST_NAME = 128


class WandbTrials:
    """A run per trial: its settings are the config, its figures the summary, its outcome and sweep are tags.

    `WANDB_MODE`, `WANDB_ENTITY`, `WANDB_DIR` and the like hold.

    Args:
        project: As for `wandb.init`.
        folder: Where W&B puts its files, unless `WANDB_DIR` says otherwise.
    """

    name = "W&B"

    def __init__(self, project: str, folder: Path) -> None:
        self._wandb = require("wandb", "wandb")
        self._project = project
        self._folder = folder
        settings = self._wandb.setup().settings
        if settings.sweep_id or settings.launch:
            raise InputError(
                "inside a W&B sweep or launch every run gets the same id; log the trials from outside of it"
            )
        refuse_to_prompt(self._wandb, None)

    def log(self, run: TrialRun) -> None:
        with self._wandb.init(
            project=self._project,
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name[:_LONGEST_NAME],
            group=run.sweep[:_LONGEST_NAME],
            job_type="trial",
            tags=list(dict.fromkeys(tag[:_LONGEST_TAG] for tag in (run.facts["outcome"], run.sweep) if tag)),
            **self._place(),
        ) as opened:
            opened.config.update({**run.config, "flopwatch_sweep": run.sweep}, allow_val_change=True)
            # What is not known is said too: a run that is brought up to date must not keep what no longer holds.
            opened.summary.update({**run.figures, **run.facts})
            opened.finish(exit_code=0 if run.state == "finished" else 1)

    def _place(self) -> dict[str, Any]:
        # The run is made after the trial: this process's output, machine and code are not the trial's.
        quiet = {"console": "off", "silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
        if os.environ.get("WANDB_DIR"):
            return {"settings": quiet}
        return {"settings": quiet, "dir": str(self._folder)}
