"""Baselines: other ways to retrieve or rank, which benchmarks compare with trees."""
