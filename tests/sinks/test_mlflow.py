import os
import random
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flopwatch.errors import FlopwatchError
from flopwatch.library_internals import mlflow_client
from flopwatch.sinks.mlflow import MlflowSink
from flopwatch.sinks.thread import SinkThread
from flopwatch.testing import FakeClock
from support.sinks.sample_run import ORIGIN, START, basic_row, records, rows
from support.sinks.servers import free_port, get_json, kill, mlflow_server, post_json

pytestmark = pytest.mark.slow


def runs_of(address, experiment):
    found = get_json(f"{address}/api/2.0/mlflow/experiments/get-by-name", experiment_name=experiment)["experiment"]
    return post_json(f"{address}/api/2.0/mlflow/runs/search", experiment_ids=[found["experiment_id"]]).get("runs", [])


def steps_of(address, run_id, key="perf/step_time"):
    history = get_json(f"{address}/api/2.0/mlflow/metrics/get-history", run_id=run_id, metric_key=key)
    return sorted(point.get("step", 0) for point in history.get("metrics", []))


@pytest.fixture
def mlflow(mlflow_address):
    """The package, talking to the real server as a training would."""
    import mlflow

    mlflow.set_tracking_uri(mlflow_address)
    yield mlflow
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


def test_the_training_s_active_run_is_used_and_not_ended(mlflow, mlflow_address, tmp_path):
    mlflow.set_experiment("active")
    mine = mlflow.start_run()
    thread = SinkThread(MlflowSink(tmp_path), lambda name, error: pytest.fail(str(error)))
    for record in records():
        thread.put(record)
    assert thread.close(60)
    (run,) = runs_of(mlflow_address, "active")
    assert (run["info"]["run_id"], run["info"]["status"]) == (mine.info.run_id, "RUNNING")
    assert steps_of(mlflow_address, mine.info.run_id) == [row.step for row in rows()]


def test_the_environment_names_server_experiment_and_run(mlflow_address, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from environment")
    monkeypatch.setenv("MLFLOW_RUN_NAME", "a good name")
    first = MlflowSink(tmp_path)
    first.write(rows()[0])
    first.close()
    (run,) = runs_of(mlflow_address, "from environment")
    assert run["info"]["run_name"] == "a good name"
    monkeypatch.setenv("MLFLOW_RUN_ID", run["info"]["run_id"])
    resumed = MlflowSink(tmp_path)
    resumed.write(rows()[1])
    resumed.close()
    assert steps_of(mlflow_address, run["info"]["run_id"]) == [10, 20]


def test_rows_wait_and_go_out_together(mlflow_address, tmp_path):
    sink = MlflowSink(tmp_path, mlflow_address, "batches")
    for record in (START, ORIGIN, *rows()):
        sink.write(record)
    (run,) = runs_of(mlflow_address, "batches")
    assert steps_of(mlflow_address, run["info"]["run_id"]) == []
    sink.flush()
    assert steps_of(mlflow_address, run["info"]["run_id"]) == [10, 20, 30, 40, 50, 60]
    sink.close()


def test_the_training_s_own_environment_is_not_changed(mlflow_address, tmp_path):
    before = dict(os.environ)
    sink = MlflowSink(tmp_path, mlflow_address, "environment")
    for record in records():
        sink.write(record)
        assert dict(os.environ) == before
    sink.close()
    assert dict(os.environ) == before


@contextmanager
def listener(answer):
    """A server that counts who comes, and answers nothing, or nothing in time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        visitors = []

        def serve():
            while True:
                try:
                    visitor, _ = server.accept()
                except OSError:
                    return
                visitors.append(visitor)
                if answer == "hang up":
                    visitor.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", visitors
        server.shutdown(socket.SHUT_RDWR)
        for visitor in visitors:
            visitor.close()


@pytest.mark.parametrize("answer", ["hang up", "never answer"])
def test_a_server_that_does_not_answer_is_asked_once(tmp_path, answer):
    with listener(answer) as (address, visitors):
        with pytest.raises(FlopwatchError, match=f"no run could be started at {address}.*MLFLOW_TRACKING_URI"):
            MlflowSink(tmp_path, address, timeout_seconds=0.3).write(rows()[0])
        assert len(visitors) == 1


def test_a_server_that_comes_back_in_time_gets_the_rows_of_its_absence(tmp_path):
    clock = FakeClock()
    port = free_port()
    with mlflow_server(tmp_path, port) as (address, process):
        sink = MlflowSink(tmp_path, address, "away", patience_seconds=60.0, clock=clock)
        sink.write(START)
        sink.write(basic_row(10))
        sink.flush()
        kill(process)
        for step in (20, 30):
            clock.advance(10.0)
            sink.write(basic_row(step))
            sink.flush()
    with mlflow_server(tmp_path, port) as (address, _):
        clock.advance(10.0)
        sink.write(basic_row(40))
        sink.close()
        (run,) = runs_of(address, "away")
        assert steps_of(address, run["info"]["run_id"]) == [10, 20, 30, 40]
        assert run["info"]["status"] == "FINISHED"


def test_a_server_that_fails_moves_no_random_number_and_changes_no_store_of_the_training(mlflow_address, tmp_path):
    from mlflow import MlflowClient

    sink = MlflowSink(tmp_path, mlflow_address, "random")
    sink.write(basic_row(10))
    before, theirs = random.getstate(), MlflowClient(mlflow_address)._tracking_client.store
    sink._run = sink._run._replace(client=mlflow_client(f"http://127.0.0.1:{free_port()}", timeout_seconds=5.0))
    sink.flush()
    assert sink._points
    assert random.getstate() == before
    assert theirs is not sink._run.client
    assert "OneTry" not in type(theirs).__name__
    sink._run = None


def test_nothing_is_printed_on_the_stdout_of_the_training(mlflow_address, tmp_path, capfd):
    sink = MlflowSink(tmp_path, mlflow_address, "silent")
    for record in records():
        sink.write(record)
    sink.close()
    assert capfd.readouterr().out == ""


@contextmanager
def answering(status):
    """A server that answers every request with this status, and counts them."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()

        def do_GET(self):
            self.do_POST()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.filterwarnings("ignore")  # of MLflow's own database code
def test_without_any_server_the_run_is_kept_in_the_output_folder(tmp_path):
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    sink = MlflowSink(tmp_path / "outputs", experiment="local")
    for record in records():
        sink.write(record)
    sink.close()
    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("local").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "perf/step_time")
    assert [point.step for point in history] == [row.step for row in rows()]
