"""Benchmarks: each reports ratios from one interleaved run."""
