"""Runs Trinity-RFT's vLLM and verl on a machine without a GPU, through hooks that both offer:

- `vllm_side.py`: a vLLM plugin. Where Trinity asks for its GPU worker, vLLM gets `vllm_worker.py`,
  Trinity's worker on top of vLLM's CPU worker.
- `verl_side.py`: verl imports it (VERL_USE_EXTERNAL_MODULES). Device functions answer for the CPU,
  gloo replaces NCCL, and engines registered for CUDA are registered for the CPU too.
- `tcp.py`: weights that both would send over NCCL go over TCP.

aflow-tune sets the variables and tells Ray how many GPUs to count (`aflow_tune/config/`). It is not
installed on machines with CUDA.
"""
