"""Measurements: `python -m lab.ablate`, `lab.bench`, `lab.bench_gpu`, `lab.plan`."""
