"""The NVIDIA GPUs of this machine: what runs on them, by whom, which are free, and freeing one.

Nothing here imports CUDA, PyTorch, Ray or Trinity, so that devices can be chosen before those look.
"""
