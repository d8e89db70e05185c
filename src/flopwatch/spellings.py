"""Other words that settings, modes and trainers may be written in, most of them from docs/requirements.md.

The code itself knows one word for each thing; these are replaced where a configuration is read.
"""

from collections.abc import Mapping

SECTIONS = ("flopwatch", "monitoring", "monitor", "performance_monitoring")
"""Sections of a training's configuration file that only flopwatch reads. They may be nested."""

MONITOR: Mapping[str, str | None] = {
    "mfu_calculation_mode": "mode",
    "measure_flops_frequency": "flops_profile_freq",
    "freq.flops_profile_freq": "flops_profile_freq",
    "smart_mode.initial_profiling": "initial_profiling",
    "smart_mode.calibration_enabled": "calibration_enabled",
    "smart_mode.recalibration_frequency": "recalibration_frequency",
    "hybrid_mode.hardware_counters_enabled": None,
    "hybrid_mode.fallback_to_profiler": None,
    "training.logging_steps": "log_every",
    "wandb.log_dataset_metrics": "log_dataset_metrics",
    "wandb.reduced_logging": "reduced_logging",
    "seq_len": "seq_length",
    "warmup_steps": "warm_up_steps",
}
"""Keys of a configuration file, without the sections around them, and the monitor's setting. None: without effect."""

MODES: Mapping[str, str] = {"hybrid": "profiler"}
"""The monitor's modes. `hybrid` was meant for hardware counters, which flopwatch does not read."""

SWEEP: Mapping[str, str] = {
    "trainer": "trainers",
    "model": "models",
    "model_size": "models",
    "model_sizes": "models",
    "batch_size": "batch_sizes",
    "seq_len": "seq_lens",
    "seq_length": "seq_lens",
    "seq_lengths": "seq_lens",
    "dtype": "dtypes",
    "micro_batch_size": "micro_batch_sizes",
    "seed": "seeds",
    "layout": "layouts",
    "warm_up_steps": "warmup_steps",
}
"""Keys of a sweep's matrix, and the setting."""

TRAINERS: Mapping[str, str] = {
    "ghostclipping": "ghost",
    "dpghostclipping": "ghost",
    "fastgradientclipping": "fast",
    "dpfastgradientclipping": "fast",
}
"""Names of built-in trainers in lower case, without spaces, hyphens and the ending `Trainer`."""
