import pytest
import torch


@pytest.fixture(autouse=True)
def untouched_by_this_machine(monkeypatch, tmp_path):
    """Neither the developer's override nor their cache may decide a test."""
    monkeypatch.delenv("FLOPWATCH_PEAK_TFLOPS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cuda_autocast():
    """Switches autocast on for CUDA; `torch.autocast` itself refuses to on a CPU build."""
    before = torch.get_autocast_dtype("cuda")

    def switch_on(dtype):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)

    yield switch_on
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


@pytest.fixture
def restored_fp32_precision():
    """Puts every switch of fp32 matmuls back. Torch releases before 2.9 have only one."""
    backends = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    before = {backend: backend.fp32_precision for backend in backends if hasattr(backend, "fp32_precision")}
    yield
    torch.set_float32_matmul_precision("highest")
    for backend, precision in before.items():
        backend.fp32_precision = precision
