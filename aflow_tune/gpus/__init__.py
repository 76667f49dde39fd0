"""The GPUs of this machine: what runs on them, by whom, which are free, and freeing one.

What the driver says comes from NVML (`nvml.py`, `reading.py`), what a process is comes from /proc
(`processes.py`). From both: a picture (`devices.py`, `showing.py`, `monitor.py`), free devices
for a run (`choosing.py`) that are claimed with a lock file each (`claims.py`), a record of how
much they were used (`use.py`), and the end of processes of one's own (`owner.py`, `freeing.py`,
`ending.py`).

Nothing here imports CUDA, PyTorch, Ray or Trinity, so that devices can be chosen before any of
them looks. What a configuration asks for is `config/engine.py`'s matter. NVIDIA
only: other makers' devices are not seen.
"""
