"""After a monitor was closed, every function of torch is torch's own, also in a process that compiles."""

import json

import pytest

from support.warm_python import start_warm

SCRIPT = """
import json, sys, types
from pathlib import Path

import torch

import flopwatch
from flopwatch.flops.tracing import regions

OURS = str(Path(flopwatch.__file__).parent)


def replaced():
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None:
            continue
        for owner in [module, *(each for each in vars(module).values() if isinstance(each, type))]:
            for attribute, value in list(vars(owner).items()):
                function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                if isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(OURS):
                    found.append(f"{getattr(owner, '__name__', owner)}.{attribute}")
    return sorted(set(found))


def train(watched):
    model = torch.compile(torch.nn.Linear(8, 8), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None if watched else flopwatch.TrainingMonitor(f"{sys.argv[1]}/own", model=model, quiet=True)
    for step in range(6):
        if monitor:
            monitor.start_step()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.log_step(step)
    during = replaced()
    if monitor:
        monitor.close()
    return during, monitor


torch._dynamo
torch.optim.SGD([torch.ones(1, requires_grad=True)])
before = replaced()
during, monitor = train(watched=False)
after = replaced()
own = monitor.summary.values["total/model_flops"]
process = flopwatch.watch(f"{sys.argv[1]}/watched", quiet=True)
again, _ = train(watched=True)
process.stop()
print(json.dumps([before, during, after, again, replaced(), own, regions.state.missed]))
"""


@pytest.mark.slow
def test_no_function_of_torch_stays_replaced_after_close(tmp_path):
    process = start_warm(SCRIPT, str(tmp_path))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    before, during, after, again, at_the_end, flops, missed = json.loads(out.splitlines()[-1])
    assert before == []
    assert during == again == ["OutputGraph.call_user_compiler"]
    assert after == at_the_end == []
    assert flops == 6 * 2 * (2 * 4 * 8 * 8), "compiled code is counted"
    assert missed is None, "and by the next monitor too"
