"""`flopwatch.watch()` in a real Jupyter kernel: what the last line of a cell shows, and where start-up begins."""

import json
import re

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow

THINKING_SECONDS = 8
WATCH = "import time, flopwatch\nw = flopwatch.watch('run', peak_flops_per_s=1e9)\nw"
THINK = f"import torch, torch._dynamo\ntime.sleep({THINKING_SECONDS})\ntime.time()"
TRAIN = """
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    sources = [WATCH, THINK, TRAIN, "w", "w.stop()", "w"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(folder))
    return folder, notebook.cells


def shown(cell, kind="text/html"):
    (page,) = [output["data"][kind] for output in cell["outputs"] if output["output_type"] == "execute_result"]
    return page


def test_the_object_of_watch_shows_a_table_with_the_waterfall(cells):
    _, (watch, _, _, running, _, ended) = cells
    assert "no training yet" in shown(watch)
    for page in (shown(running), shown(ended)):
        labels = re.findall(r"<th[^>]*>(.*?)</th>", page)
        assert {"steps", "MFU", "peak of the devices", "MFU of the whole run"} <= set(labels)


def test_start_up_begins_with_the_cell_of_the_training(cells):
    folder, (_, think, *_) = cells
    summary = json.loads((folder / "run/training_log.jsonl").read_text().splitlines()[-1])
    began = summary["unix_time"] - summary["values"]["time/wall_seconds"]
    assert began >= float(shown(think, "text/plain"))
