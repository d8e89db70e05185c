"""What a torch release lacks, so that a test that needs it can be skipped."""

import pytest
import torch


def _runs_grouped_mm() -> bool:
    rows, experts = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(1, 16, 8, dtype=torch.bfloat16)
    try:
        torch._grouped_mm(rows, experts, offs=torch.tensor([8], dtype=torch.int32))
    except (AttributeError, NotImplementedError):
        return False
    return True


needs_grouped_mm = pytest.mark.skipif(not _runs_grouped_mm(), reason="this torch has no grouped matmul for the CPU")
