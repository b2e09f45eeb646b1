"""Shared by tests: paths, tiny models, runs in short, cases for kernels, and the command line in this process."""
