"""Trinity-RFT's vLLM and verl on a machine without a GPU. Each is told in a place that it offers:

- `vllm_side.py`: an entry point of vLLM's plugins puts `vllm_worker.py`, which is Trinity's worker
  on vLLM's CPU worker, where Trinity asks for its worker on a GPU.
- `verl_side.py`: verl imports it (VERL_USE_EXTERNAL_MODULES). Its device functions answer for the
  CPU, gloo stands in for NCCL, engines registered for CUDA are registered for the CPU.
- `tcp.py`: weights that both would send over NCCL go over TCP.

aflow-tune sets the variables and tells Ray how many GPUs to count (`aflow_tune/config/`). With
CUDA none of this is installed.
"""
