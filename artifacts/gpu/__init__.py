"""Tests, measurements and instruction counts of the kernels: see `python artifacts/gpu --help`."""
