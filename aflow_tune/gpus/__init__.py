"""The GPUs of this machine: what runs on them, by whom, which are free, and freeing one.

Nothing here imports CUDA, PyTorch, Ray or Trinity, so that devices can be chosen before any of
them looks. What a configuration asks for is decided in `config/engine.py`. NVIDIA only: other
makers' devices are not seen.
"""
