"""Weights & Biases: into the run that is active, or one of our own."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flopwatch.errors import FlopwatchError, InputError
from flopwatch.metrics import STEP_KEY
from flopwatch.optional import require
from flopwatch.run_records import Notice, Provenance, Record, Row, RunStart


class WandbSink:
    """Logs one history row per logging window, with `global_step` as the x-axis of every key it logs.

    A run is looked for, or started, at the first row: by then the training has called `wandb.init` if it ever will.
    A run of our own is no `wandb.run`, captures no output and leaves a later `wandb.init` of yours alone; W&B's
    environment variables (`WANDB_MODE`, `WANDB_PROJECT`, `WANDB_DIR`, ...) hold for it. A run of yours is not finished.

    Steps are never passed as W&B's own step, so rows of yours and ours cannot push each other out of order.

    Args:
        output_dir: Where W&B puts its files, unless `WANDB_DIR` says otherwise.
        project: As for `wandb.init`, like everything in `init`.
    """

    name = "wandb"
    gather_seconds = 15.0

    def __init__(self, output_dir: Path | str, project: str | None = None, **init: Any) -> None:
        self._output_dir = Path(output_dir)
        self._init = {"project": project, **init}
        self._run: Any = None
        self._is_ours = False
        self._connection_lost = False
        self._before_first_row: list[Record] = []
        self._defined: set[str] = set()
        self._config: dict[str, Any] = {}
        self._messages: dict[str, str] = {}
        self._summary: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        if self._run is None and not isinstance(record, Row):
            self._before_first_row.append(record)
            return
        with self._noticing_a_lost_connection():
            if self._run is None:
                self._open()
            self._take(record)

    def flush(self) -> None:
        """W&B sends by itself."""

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None or not self._is_ours:
            return
        try:
            if not self._connection_lost:
                with self._noticing_a_lost_connection():
                    run.finish()
        finally:
            if self._connection_lost:
                _forget_dead_service()

    @contextmanager
    def _noticing_a_lost_connection(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # A request under way ends in errors of W&B's mailbox, which say nothing; a later one in a ConnectionError.
            if not isinstance(error, ConnectionError) and "wandb.sdk.mailbox" not in type(error).__module__:
                raise
            self._connection_lost = True
            raise FlopwatchError(
                f"W&B's background process (wandb-core) is gone ({str(error) or type(error).__name__}); nothing more "
                "of this run reaches W&B, what it had written is in its folder and `wandb sync` uploads it"
            ) from error

    def _open(self) -> None:
        wandb = require("wandb", "wandb")
        self._is_ours = wandb.run is None
        self._run = self._start(wandb) if self._is_ours else wandb.run
        self._run.define_metric(STEP_KEY)
        for record in self._before_first_row:
            self._take(record)
        self._before_first_row.clear()

    def _start(self, wandb: Any) -> Any:
        settings = self._init.get("settings")
        if settings is None or isinstance(settings, Mapping):
            settings = {"console": "off", **(settings or {})}
        options = {"reinit": "create_new", **self._init, "settings": settings}
        if "dir" not in options and not os.environ.get("WANDB_DIR"):
            self._output_dir.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(self._output_dir)
        _refuse_to_prompt(wandb, options.get("mode"))
        run = wandb.init(**options)
        # Off the list, or a later wandb.init of the training is handed this run, whatever project it names.
        wandb.setup().remove_active_run(run)
        return run

    def _take(self, record: Record) -> None:
        if isinstance(record, Row):
            self._define(record)
            self._run.log({**record.values, STEP_KEY: record.step})
        elif isinstance(record, RunStart | Provenance):
            self._config[record.type] = record.to_json()
            self._run.config.update({"flopwatch": self._config}, allow_val_change=True)
        else:
            if isinstance(record, Notice):
                self._messages[record.code] = record.message
            else:
                self._summary = record.to_json()
            self._run.summary["flopwatch"] = {**self._summary, "messages": self._messages}

    def _define(self, row: Row) -> None:
        for key in row.values.keys() - self._defined:
            self._run.define_metric(key, step_metric=STEP_KEY)
            self._defined.add(key)


def _refuse_to_prompt(wandb: Any, mode: str | None) -> None:
    """W&B would ask for a key on the training's own terminal, from a thread nobody watches."""
    mode = mode or wandb.setup().settings.mode
    if mode in ("online", "run", "shared") and not wandb.login(prompt=False, verify=False):
        raise InputError(
            f"W&B is in mode {mode!r} and knows no account; run `wandb login`, or set WANDB_MODE=offline to keep the "
            "run on this machine"
        )


def _forget_dead_service() -> None:
    """W&B's background process is gone; without this, its exit handler prints a traceback at the end of the program."""
    with suppress(BaseException):
        require("wandb", "wandb").teardown()
