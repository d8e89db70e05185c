from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_NOT_OURS = (
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # Lightning 2.6 with torch 2.13
    "ignore:.*does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*`IterableDataset` has `__len__` defined",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The frameworks warn about themselves."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for message in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(message))


@pytest.fixture(autouse=True)
def _one_thread_and_no_shared_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its settings in the process; threads would fight for the two cores."""
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    torch.set_num_threads(threads)
