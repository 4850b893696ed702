"""What dtorch costs, as ratios within one run: ``python -m benchmarks``."""
