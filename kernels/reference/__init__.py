"""The kernels' truths: the same attention in plain PyTorch, which also runs wherever no kernel does."""
