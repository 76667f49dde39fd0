"""The NVIDIA GPUs of this machine: processes on them, free ones for a run, ending processes.

Nothing here imports CUDA, PyTorch, Ray or Trinity, so devices can be chosen before those look.
"""
