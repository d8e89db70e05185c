"""Creates sinks by name, and runs each in its own thread with a bounded queue.

So a sink that hangs or fails affects neither the training nor the other sinks.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Final, cast

from flopwatch.errors import InputError
from flopwatch.guard import Guard
from flopwatch.records.run import Record, Row
from flopwatch.sinks.protocol import Sink
from flopwatch.text import first_line

_CLOSE: Final = "close"
_CAUGHT_UP: Final = "caught up"
_MOST_GATHERED = 20
"""The thread wakes early if this many rows wait: with the default of 50 steps per row, that is after 1,000 steps."""


class SinkThread:
    """Passes records from a queue to one sink, in a daemon thread that sleeps while the queue is empty.

    Rows are gathered for a few seconds, written together and flushed, because every wake-up costs the training thread
    20 µs and cold caches: five rows together take less than half the CPU time of five single rows. Other records are
    written immediately.

    Attributes:
        is_closing: Whether it takes no more records, because `close` was called.
        failed: Why the sink was switched off; None while it works.
        cpu_seconds: CPU time of this thread until it wrote its last record.
    """

    def __init__(
        self,
        sink: Sink,
        on_failure: Callable[[str, BaseException], None],
        queue_size: int = 1000,
        gather_seconds: float = 1.0,
    ) -> None:
        """Start the thread. `on_failure` is called once, in it, with the sink's name and its first error.

        Of other records than rows, which matter more, twice `queue_size` may wait. The sink's own `gather_seconds`
        comes first; 0 writes every row immediately.
        """
        self.name = sink.name
        self.failed: str | None = None
        self.cpu_seconds = 0.0
        self.is_closing = False
        self._sink = sink
        self._on_failure = on_failure
        self._queue_size = queue_size
        self._gather_seconds: float = getattr(sink, "gather_seconds", gather_seconds)
        self._rejected = 0
        self._wake = Event()
        # Median time of put() while a consumer waits: SimpleQueue 8 µs, Queue 20 µs, deque with Condition 20 µs.
        self._queue: SimpleQueue[Record | str | Event] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"flopwatch-{sink.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._switch_off(error)

    @property
    def dropped_rows(self) -> int:
        """Records dropped because the queue was full, or rows that the sink itself had to drop (`lost_rows`)."""
        return self._rejected + int(getattr(self._sink, "lost_rows", 0))

    def put(self, record: Record) -> bool:
        """Queue a record without blocking; never raises. Returns False if the record is dropped."""
        if self.is_closing or self.failed is not None:
            return False
        is_row = isinstance(record, Row)
        if self._queue.qsize() >= (self._queue_size if is_row else 2 * self._queue_size):
            self._rejected += 1
            return False
        self._queue.put(record)
        if not is_row or self._queue.qsize() >= _MOST_GATHERED:
            self._wake.set()
        return True

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all queued records are written. Returns False if the timeout ended first."""
        if self.is_closing or self.failed is not None:
            return False
        done = Event()
        self._queue.put(done)
        self._wake.set()
        # If the sink has failed meanwhile, its thread has ended and will never set the event.
        return self.failed is None and done.wait(timeout_seconds) and self.failed is None

    def close(self, timeout_seconds: float) -> bool:
        """Write all queued records, close the sink and end the thread. Returns False if the timeout ended first."""
        if not self.is_closing:
            self.is_closing = True
            self._queue.put(_CLOSE)
            self._wake.set()
        if self._thread.ident is not None:  # else it could not be started
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread without a report
            self._switch_off(error)
        self.cpu_seconds = time.thread_time()

    def _serve(self) -> None:
        unflushed = False
        while (record := self._next(unflushed)) != _CLOSE:
            if isinstance(record, str | Event):
                self._sink.flush()
                unflushed = False
                if isinstance(record, Event):
                    record.set()
            elif not (isinstance(record, Row) and self.name in record.skip):
                self._sink.write(record)
                unflushed = True
            self.cpu_seconds = time.thread_time()
        self._sink.flush()
        self._sink.close()

    def _next(self, unflushed: bool) -> Record | str | Event:
        """Wait for the next record; if none is queued but written records are unflushed, return `_CAUGHT_UP`."""
        with suppress(Empty):
            return self._queue.get_nowait()
        if unflushed:
            return _CAUGHT_UP
        if self._gather_seconds:
            self._wake.wait(self._gather_seconds)
            self._wake.clear()
            with suppress(Empty):
                return self._queue.get_nowait()
        return self._queue.get()

    def _switch_off(self, error: BaseException) -> None:
        self.failed = f"{type(error).__name__}: {first_line(error)}"
        with suppress(Empty):
            while True:
                waiting = self._queue.get_nowait()
                if isinstance(waiting, Event):
                    waiting.set()
        with Guard("the report of a sink's failure"):
            self._on_failure(self.name, error)
        with suppress(
            BaseException
        ):  # a sink that failed may still have an open file or port; its code may do anything
            self._sink.close()


_CLASSES = {
    "console": "flopwatch.sinks.console:ConsoleSink",
    "tensorboard": "flopwatch.sinks.tensorboard:TensorBoardSink",
    "wandb": "flopwatch.sinks.wandb:WandbSink",
    "mlflow": "flopwatch.sinks.mlflow:MlflowSink",
    "prometheus": "flopwatch.sinks.prometheus:PrometheusSink",
}
SINK_NAMES = tuple(_CLASSES)


def build_sinks(
    wanted: Sequence[str | Sink], output_dir: Path, options: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Sink], dict[str, str]]:
    """Create the wanted sinks. A sink opens files and connections later, in its thread, at its first record.

    >>> sinks, failures = build_sinks(["console", "prometheus:9480"], Path("outputs"), {"console": {}})
    >>> [sink.name for sink in sinks]
    ['console', 'prometheus']
    >>> build_sinks(["prometheus:x"], Path("outputs"), {})[1]
    {'prometheus:x': "'prometheus:x': 'x' is not a port; write a number from 1 to 65535, such as prometheus:9477"}

    Args:
        wanted: Names from `SINK_NAMES`, `prometheus:PORT`, `module:Class`, or objects with the methods of `Sink`.
        output_dir: The run's folder, in which sinks create their files.
        options: Keyword arguments for the classes of sinks, by the name in `wanted`.

    Returns:
        The sinks, and the reason for each sink that could not be created.

    Raises:
        InputError: There is no sink with that name.
    """
    sinks: list[Sink] = []
    failures: dict[str, str] = {}
    for want in wanted:
        if not isinstance(want, str):
            sinks.append(_checked(want))
            continue
        check_name(want)
        with Guard(want, lambda name, error: failures.update({name: first_line(error)})):
            sinks.append(_make(want, output_dir, options))
    return sinks, failures


def check_name(want: str) -> None:
    """Raise InputError if there is no sink with that name."""
    if want not in SINK_NAMES and ":" not in want:
        close = get_close_matches(want, SINK_NAMES, n=1)
        maybe = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(
            f"there is no sink {want!r}; {maybe}Use one of {', '.join(SINK_NAMES)}, your own as 'module:Class', "
            "or an object of such a class"
        )


def split_port(want: str) -> tuple[str, dict[str, int]]:
    """Separate the port from `prometheus:9480`.

    >>> split_port("prometheus:9480"), split_port("my_sinks:Mine")
    (('prometheus', {'port': 9480}), ('my_sinks:Mine', {}))
    """
    name, _, port = want.partition(":")
    if name != "prometheus" or not port:
        return want, {}
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{want!r}: {port!r} is not a port; write a number from 1 to 65535, such as prometheus:9477")
    return name, {"port": int(port)}


def _make(want: str, output_dir: Path, options: Mapping[str, Mapping[str, Any]]) -> Sink:
    name, port = split_port(want)
    places = {"tensorboard": {"log_dir": output_dir / "tensorboard"}}
    places |= {other: {"output_dir": output_dir} for other in ("wandb", "mlflow")}
    module, _, class_name = _CLASSES.get(name, name).partition(":")
    try:
        made = getattr(import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name!r} cannot be imported ({error}); correct the name, or set PYTHONPATH") from error
    return _checked(made(**{**places.get(name, {}), **options.get(name, {}), **port}))


def _checked(sink: Any) -> Sink:
    missing = [method for method in ("write", "flush", "close") if not callable(getattr(sink, method, None))]
    if missing or not isinstance(getattr(sink, "name", None), str):
        lacks = ", ".join(missing) or "a name"
        raise InputError(f"{sink!r} is not a sink, because it lacks {lacks}; see flopwatch.sinks.protocol.Sink")
    return cast("Sink", sink)
