import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flopwatch.records.run import Row, RunStart
from flopwatch.sinks.prometheus import PrometheusSink
from support.sinks.sample_run import START, detailed_row
from support.sinks.servers import free_port


@pytest.fixture
def sink():
    made = PrometheusSink(free_port())
    yield made
    made.close()


def exposed(sink):
    """The page as it is served: series to value, and the help text of each name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{sink._port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    helps = dict(line[7:].split(" ", 1) for line in lines if line.startswith("# HELP"))
    return {series: float(value) for series, value in values.items()}, helps


def test_before_the_first_row_no_number_is_shown(sink):
    sink.write(START)
    assert [series.partition("{")[0] for series in exposed(sink)[0]] == ["flopwatch_run_info"]


def test_names_have_units_and_help_says_what_the_metric_says(sink):
    sink.write(START)
    sink.write(detailed_row(50))
    values, helps = exposed(sink)
    assert values["flopwatch_perf_step_time_seconds"] == detailed_row(50).values["perf/step_time"]
    assert values["flopwatch_time_train_seconds"] == detailed_row(50).values["time/train_seconds"]
    assert values["flopwatch_total_model_flops"] == float(2**70 + 50)
    assert values['flopwatch_dataset_loss{dataset="数学 (zh)"}'] == detailed_row(50).values["dataset/数学 (zh)/loss"]
    assert helps["flopwatch_perf_mfu"].startswith("Model FLOPs over what the devices could have done")


def test_a_scrape_has_the_values_of_one_row_and_the_newest_of_the_users_own(sink):
    sink.write(START)
    sink.write(Row(1, 0.0, {"perf/hfu": 0.5, "perf/mfu": 0.4, "dataset/a/loss": 2.0, "mine": 1.0}, detailed=True))
    sink.write(Row(2, 0.0, {"perf/mfu": 0.41}))
    values, _ = exposed(sink)
    assert values["flopwatch_perf_mfu"] == 0.41
    assert values["flopwatch_global_step"] == 2
    assert "flopwatch_perf_hfu" not in values
    assert 'flopwatch_dataset_loss{dataset="a"}' not in values
    assert values["flopwatch_mine"] == 1.0


def test_the_page_is_what_prometheus_reads_and_names_the_run(sink, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    sink.write(RunStart("one", 0.0, 'runs/night "7"', rank=0, world_size=2, environment={"host": "node1"}))
    sink.write(detailed_row(50))
    with urllib.request.urlopen(f"http://127.0.0.1:{sink._port}/metrics", timeout=10) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    labels = families["flopwatch_run_info"].samples[0].labels
    known = {name: labels[name] for name in ("run", "host", "rank", "world_size", "slurm_job_id")}
    assert known == {"run": 'night "7"', "host": "node1", "rank": "0", "world_size": "2", "slurm_job_id": "4711"}
    assert families["flopwatch_perf_mfu"].samples[0].value == detailed_row(50).values["perf/mfu"]


def test_without_a_port_the_next_free_one_is_taken_and_told():
    told = []
    sinks = [PrometheusSink() for _ in range(2)]
    for sink in sinks:
        sink.tell = told.append
    try:
        for sink in sinks:
            sink.write(START)
        first, second = (sink._port for sink in sinks)
        assert 9477 <= first < second
        assert f"http://127.0.0.1:{second}/metrics" in told[-1]
        assert exposed(sinks[1])[0]
    finally:
        for sink in sinks:
            sink.close()


def test_closing_frees_the_port(sink):
    sink.write(START)
    sink.close()
    with pytest.raises(urllib.error.URLError):
        exposed(sink)
    again = PrometheusSink(sink._port)
    again.write(START)
    again.close()


def test_only_this_machine_is_served(sink):
    sink.write(START)
    assert sink._server.server_address[0] == "127.0.0.1"
