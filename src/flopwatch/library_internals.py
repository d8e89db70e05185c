"""Undocumented names of other libraries that flopwatch uses, and what happens in a release that lacks them.

Counting FLOPs imports none of these libraries, because a library that is not loaded cannot be part of the model. If a
sink needs a name that is missing and has no substitute, the sink fails at its first record: flopwatch reports that once
and switches the sink off, and the training and the other sinks continue.

Checked with transformers 5.22.2, Opacus 1.6.0, lightning 2.6, tensorboard 2.21, wandb 0.31 and mlflow 3.17.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flopwatch.errors import FlopwatchError
from flopwatch.optional import require

SHARDED_FORWARDS = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")
"""Modules that set a sharded `forward` on single objects of a model class. The class itself keeps the complete
`forward`. If these modules are missing, `forward` is never replaced."""


def find_trainer(callback: Any) -> Any:
    """The Hugging Face `Trainer` that is calling this callback, or None if it is not found.

    A `Trainer` does not pass itself to its callbacks, so the call stack is searched for a `self` whose
    `callback_handler` holds the callback. Without it, the callback logs no tokens and no FLOPs, and warns about that.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "__dict__", {}).get("callback_handler")
        if any(each is callback for each in getattr(handler, "callbacks", ())):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def guarded_part(trainer: Any) -> str:
    """The name of the `Trainer` method to wrap, so that an exception in it closes the monitor.

    Exceptions of the data loader and of other callbacks pass through `_run_epoch` too. In releases without it, these
    close the monitor when the next training begins.
    """
    return "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"


def lightning_logs_this_step(trainer: Any) -> bool:
    """Whether Lightning is about to write a row to its loggers.

    In releases without `trainer._logger_connector.should_update_logs`, the documented rule is used. It selects other
    steps with several optimizers, because `global_step` counts the steps of all.
    """
    due = getattr(getattr(trainer, "_logger_connector", None), "should_update_logs", None)
    every = trainer.log_every_n_steps
    return bool(every and trainer.global_step % every == 0 if due is None else due)


def lightning_row_writer(trainer: Any) -> Any:
    """The object whose `log_metrics` Lightning calls with the values of a row before any of its loggers gets them.

    Lightning's public ways, `log` and `log_dict`, also put a value into `trainer.callback_metrics`. In releases without
    `_logger_connector` this is None, and our values get rows of their own.
    """
    connector = getattr(trainer, "_logger_connector", None)
    return connector if hasattr(connector, "log_metrics") else None


def without_fabric_wrapper(model: Any) -> Any:
    """The model that `fabric.setup` has wrapped, or `model` itself if it is not wrapped.

    Fabric's public `is_wrapped` is asked first, because a user's model may have an attribute `module` too.
    """
    for name in ("lightning.fabric", "lightning_fabric"):
        is_wrapped = getattr(sys.modules.get(name), "is_wrapped", None)
        if is_wrapped is not None and is_wrapped(model):
            return model.module
    return model


class EventFormat:
    """The classes that write TensorBoard's event files. If one of them is missing, the sink fails.

    TensorBoard documents only writers that need TensorFlow or torch. `torch.utils.tensorboard` itself uses
    `tensorboard.compat.proto` and `RecordWriter`.
    """

    def __init__(self) -> None:
        events = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self.Event, self.SessionLog = events.Event, events.SessionLog
        self.Summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self.RecordWriter = require("tensorboard.summary.writer.record_writer", "tensorboard").RecordWriter


def wandb_run_hider(wandb: Any) -> Callable[[Any], None]:
    """A function that removes a run from W&B's list of active runs.

    If the training calls `wandb.init` later, W&B returns a run from that list, even for another project.

    Raises:
        FlopwatchError: This release of wandb has no `remove_active_run`.
    """
    hide: Callable[[Any], None] | None = getattr(wandb.setup(), "remove_active_run", None)
    if hide is None:
        raise FlopwatchError(
            f"wandb {wandb.__version__} cannot keep the run of flopwatch apart from the run of the training; install "
            "wandb 0.31, or log the values of flopwatch to your own run with wandb.log({..., **monitor.latest})"
        )
    return hide


def is_lost_wandb_service(error: Exception) -> bool:
    """Whether the error means that W&B's background process has exited.

    A request that was waiting for an answer then raises an error of `wandb.sdk.mailbox`, every later one
    ConnectionError. If a release renames that module, the sink reports W&B's own error.
    """
    return isinstance(error, ConnectionError) or "wandb.sdk.mailbox" in type(error).__module__


def latest_mlflow_run(mlflow: Any) -> Any:
    """The newest active MLflow run of any thread, or None.

    `mlflow.active_run` and `mlflow.last_active_run` return only a run of the calling thread, but a sink runs in a
    thread of its own. In releases without `_get_latest_active_run` the training's run is not found, and the sink
    starts a new run.
    """
    fluent = require("mlflow.tracking.fluent", "mlflow")
    return getattr(fluent, "_get_latest_active_run", mlflow.active_run)()


def mlflow_client(uri: str, timeout_seconds: float) -> Any:
    """MLflow's client, or, for a server, a store with those of its methods that a sink needs, which never tries again.

    `MlflowClient` tries again for 247 s (measured with a closed port), draws from `random` before each try, and prints
    on the training's stdout when it ends a run. Only environment variables change the tries, and its store is kept for
    all clients of the address, so a change to either would affect the training's own calls. In releases without
    `RestStore._call_endpoint` requests are tried again, and a server that is down is noticed late.
    """
    if not uri.startswith(("http://", "https://")):
        return require("mlflow.tracking", "mlflow").MlflowClient(uri)
    rest, service = require("mlflow.utils.rest_utils", "mlflow"), require("mlflow.protos.service_pb2", "mlflow")
    limits = {"max_retries": 0, "timeout": timeout_seconds, "raise_on_status": False}
    places = rest.extract_api_info_for_service(service.MlflowService, "/api/2.0")

    class OneTry(require("mlflow.store.tracking.rest_store", "mlflow").RestStore):  # type: ignore[misc]
        def create_run(self, experiment_id: str, run_name: str | None) -> Any:
            return super().create_run(experiment_id, "unknown", int(time.time() * 1000), [], run_name)

        def set_terminated(self, run_id: str) -> None:
            self.update_run_info(run_id, service.RunStatus.Value("FINISHED"), int(time.time() * 1000), None)

        def _call_endpoint(self, api: Any, json_body: str, *_: Any, **__: Any) -> Any:
            path, method = places[api]
            content = {"params" if method == "GET" else "json": json.loads(json_body)}
            response = rest.http_request(self.get_host_creds(), path, method, **limits, **content)
            rest.parse_dict(rest.verify_rest_response(response, path).json(), answer := api.Response())
            return answer

    return OneTry(partial(require("mlflow.utils.credentials", "mlflow").get_default_host_creds, uri))
