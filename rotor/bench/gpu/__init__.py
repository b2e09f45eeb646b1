"""What a GPU is asked first: tests, kernels, whole models, engines; phases with a process and a time limit each."""
