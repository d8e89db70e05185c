"""What the sinks use of TensorBoard, W&B and MLflow beyond the documented interfaces, and what happens without it.

If a name is missing and there is no substitute, the sink fails at its first record: it is reported once and switched
off, and the training and the other sinks go on.
"""

from collections.abc import Callable
from typing import Any

from flopwatch.errors import FlopwatchError, MissingDependencyError
from flopwatch.optional import require


class EventFormat:
    """TensorBoard's event file format; checked with tensorboard 2.21. Without one of these names the sink fails.

    TensorBoard documents only writers that need TensorFlow or torch. `tensorboard.compat.proto` and `RecordWriter` are
    what torch.utils.tensorboard itself writes with.
    """

    def __init__(self) -> None:
        events = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self.Event, self.SessionLog = events.Event, events.SessionLog
        self.Summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self.RecordWriter = require("tensorboard.summary.writer.record_writer", "tensorboard").RecordWriter


def wandb_run_hider(wandb: Any) -> Callable[[Any], None]:
    """A function that takes a run off W&B's list of active runs; checked with wandb 0.31.

    A later `wandb.init` of the training would return a run on that list, even for another project. So without
    `remove_active_run` the sink must not start a run.

    Raises:
        FlopwatchError: This release has no `remove_active_run`.
    """
    hide: Callable[[Any], None] | None = getattr(wandb.setup(), "remove_active_run", None)
    if hide is None:
        raise FlopwatchError(
            f"wandb {wandb.__version__} cannot keep our run apart from the training's; install wandb 0.31, or log "
            "monitor.latest to your own run with wandb.log({..., **monitor.latest})"
        )
    return hide


def is_lost_wandb_service(error: Exception) -> bool:
    """Whether the error means that W&B's background process is gone; checked with wandb 0.31.

    A later request ends in a ConnectionError; one under way ends in errors of `wandb.sdk.mailbox`, which W&B does not
    export. Under another name such an error is reported as it is, and `finish` may print a traceback at the end.
    """
    return isinstance(error, ConnectionError) or "wandb.sdk.mailbox" in type(error).__module__


def latest_mlflow_run(mlflow: Any) -> Any:
    """The newest active run of any thread; checked with mlflow 3.17.

    `mlflow.active_run` knows only the runs of the calling thread, and sinks have their own thread. Without
    `_get_latest_active_run` the training's run is not found, and the sink starts a new run.
    """
    fluent = require("mlflow.tracking.fluent", "mlflow")
    return getattr(fluent, "_get_latest_active_run", mlflow.active_run)()


def mlflow_request_sender(uri: str, timeout_seconds: float) -> Callable[..., Any] | None:
    """A function that sends one request to an MLflow server, once; None if MLflow lacks the names for it.

    `MlflowClient` repeats a request until 247 s have passed (measured with a closed port), and only the environment of
    the whole process can change that, for the training's own calls too. `rest_utils.http_request` takes both limits as
    arguments; checked with mlflow 3.17. Without it the sink uses `MlflowClient` and notices a dead server late.
    """
    try:
        http_request = require("mlflow.utils.rest_utils", "mlflow").http_request
        credentials = require("mlflow.utils.credentials", "mlflow").get_default_host_creds(uri)
    except (AttributeError, MissingDependencyError):
        return None

    def send(method: str, path: str, **content: Any) -> Any:
        limits = {"max_retries": 0, "timeout": timeout_seconds, "raise_on_status": False}
        return http_request(credentials, f"/api/2.0/mlflow/{path}", method, **limits, **content)

    return send


def checked_mlflow_response(response: Any) -> Any:
    """The content of a response; raises MLflow's own error for a refusal. Always there if `http_request` is."""
    return require("mlflow.utils.rest_utils", "mlflow").verify_rest_response(response, response.url).json()
