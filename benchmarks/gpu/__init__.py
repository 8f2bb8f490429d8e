"""The stages of `python -m benchmarks.gpu_all`: what is checked and measured on a GPU, each in a process of its own."""
