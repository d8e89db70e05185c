"""What tests and benchmarks both stand on: models with known FLOPs, made-up sweeps, real clusters, broken networks."""
