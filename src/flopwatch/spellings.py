"""Other words for settings of the monitor and of sweeps, trainers and compute types, most from docs/requirements.md.

The code itself knows one word for each thing; these are replaced where a configuration is read.
"""

from collections.abc import Mapping

SECTIONS = ("flopwatch", "monitoring", "monitor", "performance_monitoring")
"""Sections of a training's configuration file that only flopwatch reads. They may be nested."""

MONITOR: Mapping[str, str] = {
    "mfu_calculation_mode": "mode",
    "measure_flops_frequency": "flops_profile_freq",
    "freq.flops_profile_freq": "flops_profile_freq",
    "smart_mode.initial_profiling": "initial_profiling",
    "smart_mode.calibration_enabled": "calibration_enabled",
    "smart_mode.recalibration_frequency": "recalibration_frequency",
    "hybrid_mode.hardware_counters_enabled": "hardware_counters_enabled",
    "hybrid_mode.fallback_to_profiler": "fallback_to_profiler",
    "training.logging_steps": "log_every",
    "wandb.log_dataset_metrics": "log_dataset_metrics",
    "wandb.reduced_logging": "reduced_logging",
    "seq_len": "seq_length",
    "warmup_steps": "warm_up_steps",
}
"""Keys of a configuration file, without the sections around them, and the monitor's setting."""

SWEEP: Mapping[str, str] = {"model_size": "model", "seq_length": "seq_len"}
"""Keys of a sweep's matrix and flags of its commands (`--model-size`), and the setting."""

TRAINERS: Mapping[str, str] = {
    "ghostclipping": "ghost",
    "dpghostclipping": "ghost",
    "fastgradientclipping": "fast",
    "dpfastgradientclipping": "fast",
}
"""Names of built-in trainers in lower case, without spaces, hyphens and the ending `Trainer`."""

# The types with 16-bit accumulation, which is faster on GeForce, are used only if the user asks for them, because
# PyTorch accumulates in fp32.
_COMPUTE_TYPES = {
    "fp64": "float64 double f64",
    "fp32": "float32 float single f32",
    "tf32": "tensorfloat32 xf32",
    "bf16": "bfloat16",
    "fp16": "float16 half f16",
    "fp8": "float8 f8 e4m3 e5m2 mxfp8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz",
    "fp6": "float6 mxfp6",
    "fp4": "float4 nvfp4 mxfp4 float4_e2m1fn_x2",
    "int8": "i8",
    "int4": "i4",
    "fp16_fp16acc": "",
    "fp8_fp16acc": "",
}
COMPUTE_TYPES: Mapping[str, str] = {
    word: name for name, words in _COMPUTE_TYPES.items() for word in (name, *words.split())
}
"""Words for compute types, and the name in the table of peak FLOP/s."""
