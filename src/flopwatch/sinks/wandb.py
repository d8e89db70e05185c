"""Logs rows to Weights & Biases, into a run separate from the training's run."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flopwatch.errors import FlopwatchError, InputError
from flopwatch.library_internals import is_lost_wandb_service, wandb_run_hider
from flopwatch.optional import require
from flopwatch.records.metrics import STEP_KEY
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, Summary
from flopwatch.sinks.protocol import Sink

_SUFFIX = "-flopwatch"


class WandbSink(Sink):
    """Logs one history row per logging window, with `global_step` as the x-axis of every key.

    The sink logs into a run of its own, because W&B has one step counter per run. A row of flopwatch in the training's
    run would advance the counter, and W&B drops later rows of the training that have a smaller step. A row of flopwatch
    would also end or change a row to which the training may still add values (`commit=False` or `step=`). If the
    training has a run R, the new run has the project, group, mode and folder of R, the id `<R's id>-flopwatch` and the
    name `<R's name> (flopwatch)`. The training's run gets only the totals, at the end, as `summary["flopwatch"]`.

    The sink starts its run at the first row, when the training has usually called `wandb.init`. The run does not become
    `wandb.run`, captures no output and does not affect a later `wandb.init`. W&B's environment variables (`WANDB_MODE`,
    `WANDB_PROJECT`, `WANDB_DIR`, ...) apply to it, except `WANDB_RUN_ID`, which names the run of the training.

    Args:
        output_dir: The folder for W&B's files, unless `WANDB_DIR` or the training's run names another one.
        project: As for `wandb.init`.
        into_active_run: True logs into the active run; only for a training that logs nothing to W&B itself.
        init: Further arguments of `wandb.init`.
    """

    name = "wandb"
    gather_seconds = 15.0

    def __init__(
        self, output_dir: Path | str, project: str | None = None, *, into_active_run: bool = False, **init: Any
    ) -> None:
        self._output_dir = Path(output_dir)
        self._init = init if project is None else {"project": project, **init}
        self._into_active_run = into_active_run
        self._run: Any = None
        self._is_ours = False
        self._users_run: Any = None
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
                # W&B's exit handler would fail with a traceback, because its background process has exited.
                with suppress(BaseException):  # `teardown` calls `sys.exit` if that process has failed
                    require("wandb", "wandb").teardown()

    @contextmanager
    def _noticing_a_lost_connection(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the errors of a lost connection have no common class
            if not is_lost_wandb_service(error):
                raise
            self._connection_lost = True
            raise FlopwatchError(
                f"W&B's background process (wandb-core) has exited ({str(error) or type(error).__name__}); W&B gets no "
                "more rows of this run. Earlier rows are in the run's folder: upload them with `wandb sync`"
            ) from error

    def _open(self) -> None:
        wandb = require("wandb", "wandb")
        self._is_ours = wandb.run is None or not self._into_active_run
        self._users_run = wandb.run if self._is_ours else None
        self._run = self._start(wandb) if self._is_ours else wandb.run
        self._run.define_metric(STEP_KEY)
        for record in self._before_first_row:
            self._take(record)
        self._before_first_row.clear()

    def _start(self, wandb: Any) -> Any:
        options = {"reinit": "create_new", **self._place(), **self._init}
        settings = self._init.get("settings")
        if settings is None or isinstance(settings, Mapping):
            # Statistics of the machine are switched off if there is a run of the training, which has them.
            users = self._users_run
            beside = {} if users is None else {"x_disable_stats": True, "base_url": users.settings.base_url}
            options["settings"] = {"console": "off", **beside, **(settings or {})}
        if shared := shared_id(wandb):
            raise InputError(
                f"in a {shared} W&B gives every run of a process the same id, so flopwatch cannot log into a separate "
                "run; log its values into your run with wandb.log({..., **monitor.latest}), or, if you log nothing to "
                "W&B yourself, set sink_options: {wandb: {into_active_run: true}}"
            )
        refuse_to_prompt(wandb, options.get("mode"))
        hide = wandb_run_hider(wandb)
        run = wandb.init(**options)
        hide(run)
        return run

    def _place(self) -> dict[str, Any]:
        """Arguments of `wandb.init` that place the run beside the run of the training, if there is one."""
        if (users := self._users_run) is not None:
            mode = "disabled" if users.disabled else "offline" if users.offline else "online"
            names = {"name": f"{users.name} (flopwatch)" if users.name else None, "job_type": "flopwatch"}
            place = {"project": users.project, "entity": users.entity or None, "group": users.group or None}
            # If the run of the training is resumed, ours is resumed too.
            again = {"id": users.id + _SUFFIX, "resume": "allow"}
            return {**place, **names, **again, "mode": mode, "dir": users.settings.root_dir}
        place = {}
        if os.environ.get("WANDB_RUN_ID"):  # the training will use this id in its own wandb.init
            place |= {"id": os.environ["WANDB_RUN_ID"] + _SUFFIX, "resume": "allow"}
        if "dir" not in self._init and not os.environ.get("WANDB_DIR"):
            self._output_dir.mkdir(parents=True, exist_ok=True)
            place["dir"] = str(self._output_dir)
        return place

    def _take(self, record: Record) -> None:
        if isinstance(record, Row):
            for key in record.values.keys() - self._defined:
                self._run.define_metric(key, step_metric=STEP_KEY)
                self._defined.add(key)
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
            if self._users_run is not None and isinstance(record, Summary):
                with suppress(Exception):  # that run may be finished
                    self._users_run.summary["flopwatch"] = {**self._summary, "run": self._run.id}


def shared_id(wandb: Any) -> str:
    """`sweep` or `launch` if W&B has started this process in one, where all runs get the same id; otherwise empty."""
    settings = wandb.setup().settings
    return "sweep" if settings.sweep_id else "launch" if settings.launch else ""


def refuse_to_prompt(wandb: Any, mode: str | None) -> None:
    """Raise an error if W&B is not logged in, because W&B would ask for a key on the terminal of the training."""
    mode = mode or wandb.setup().settings.mode
    if mode in ("online", "run", "shared") and not wandb.login(prompt=False, verify=False):
        raise InputError(
            f"W&B is in mode {mode!r}, but you are not logged in; run `wandb login`, or set WANDB_MODE=offline to keep "
            "the run on this machine"
        )
