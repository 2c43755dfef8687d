"""Benchmarks: each is a script that measures its baselines in the same run and writes a result file."""
