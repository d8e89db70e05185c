"""The monitors people use today, each as its documentation tells a user of a plain loop to call it.

Imported with the python they are installed in (`rivals_venv.py`). Each function starts one of them.
"""

import atexit
import importlib.abc
import importlib.machinery
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

from overhead.torch_patches import TorchPatches
from overhead.training_loop import LOG_EVERY, Contender, Training


def lightning(training: Training, folder: Path) -> Contender:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.throughput import ThroughputMonitor, measure_flops
    from lightning.pytorch.loggers import TensorBoardLogger

    fabric = Fabric(accelerator="cpu", devices=1, loggers=TensorBoardLogger(folder / "lightning"))
    fabric.launch()
    monitor = ThroughputMonitor(fabric, window_size=LOG_EVERY)
    with torch.device("meta"):  # as its documentation recommends
        twin = Training(training.size)
    flops = measure_flops(twin.model, twin.forward, lambda loss: loss)
    began = time.perf_counter()
    samples, tokens = training.size.batch_size, training.batch["input_ids"].numel()

    def step(number: int) -> None:
        training.step()
        done = number + 1
        seconds = time.perf_counter() - began
        monitor.update(time=seconds, batches=done, samples=done * samples, lengths=done * tokens, flops=flops)
        if done % LOG_EVERY == 0:
            monitor.compute_and_log(step=number)

    return Contender(step)


def composer(training: Training, folder: Path) -> Contender:
    _stand_in_for_torchvision()
    from composer.callbacks import SpeedMonitor
    from composer.core import State
    from composer.devices import DeviceCPU
    from composer.loggers import Logger, TensorboardLogger
    from composer.models import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc]
        def flops_per_batch(self, batch: Any) -> int:
            return 6 * tokens * parameters

        def forward(self, batch: Any) -> Any:
            raise NotImplementedError

        def loss(self, outputs: Any, batch: Any) -> Any:
            raise NotImplementedError

    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    samples, tokens = training.size.batch_size, training.batch["input_ids"].numel()
    state = State(model=Model(), rank_zero_seed=0, run_name="overhead", device=DeviceCPU(), max_duration="1000000ba")
    destination = TensorboardLogger(log_dir=str(folder / "composer"), flush_interval=100)
    logger = Logger(state, destinations=[destination])
    destination.init(state, logger)
    monitor = SpeedMonitor(window_size=LOG_EVERY)
    monitor.init(state, logger)
    state.batch = training.batch

    def step(number: int) -> None:
        began = time.perf_counter()
        training.step()
        spent = timedelta(seconds=time.perf_counter() - began)
        state.timestamp = state.timestamp.to_next_batch(samples=samples, tokens=tokens, duration=spent)
        monitor.batch_end(state, logger)

    return Contender(step)


def mfu_tracker(training: Training, folder: Path) -> Contender:
    from mfu_tracker import param_bytes, profile_flops, track

    flops = profile_flops(training.model, kwargs=training.batch, with_backward=True)
    weights = param_bytes(training.model)

    def step(number: int) -> None:
        training.optimizer.zero_grad(set_to_none=True)
        with track(flops, weights, dtype="bf16"):
            loss = training.forward()
            training.finish(loss)

    return Contender(step)


def traceml(training: Training, folder: Path) -> Contender:
    import traceml_ai

    patches = TorchPatches()
    port = _free_port()
    _serve_traceml(folder, port)
    traceml_ai.init(
        mode="auto",
        aggregator_port=port,
        session_id="overhead",
        logs_dir=str(folder / "traceml"),
        on_missing_aggregator="raise",
        connect_timeout_sec=60,
    )

    def step(number: int) -> None:
        with traceml_ai.trace_step(training.model):
            training.step()

    return Contender(step, apart=patches.taken_back)


def deepspeed(training: Training, folder: Path, every: int) -> Contender:
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    patches = TorchPatches()
    profiler = FlopsProfiler(training.model)

    def step(number: int) -> None:
        training.optimizer.zero_grad(set_to_none=True)
        is_profiled = number % every == 0
        if is_profiled:
            profiler.start_profile()
        loss = training.forward()
        if is_profiled:
            profiler.stop_profile()
            profiler.get_total_flops()
            profiler.end_profile()
        training.finish(loss)

    return Contender(step, apart=patches.taken_back)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve_traceml(folder: Path, port: int) -> None:
    """Its second process, which collects; ended with this one, as it outlives a failure otherwise."""
    command = [str(Path(sys.executable).parent / "traceml"), "serve", "--run-name", "overhead"]
    process = subprocess.Popen(
        [*command, "--logs-dir", str(folder / "traceml"), "--aggregator-port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(os.killpg, process.pid, signal.SIGKILL)


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision's wheel from PyPI needs CUDA's libraries; Composer imports it for pictures only."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_torchvision = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_torchvision else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _anything(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def _stand_in_for_torchvision() -> None:
    sys.meta_path.insert(0, _StandIn())
