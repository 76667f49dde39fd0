"""VERL_USE_EXTERNAL_MODULES=trinity_on_cpu.verl_side: imported while verl is imported."""

import torch
from verl.utils import device

if not torch.cuda.is_available():
    _NOTHING = {
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (0, 0),
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "ipc_collect": None,
    }
    for _name, _value in _NOTHING.items():
        if not hasattr(torch.cpu, _name):
            setattr(torch.cpu, _name, lambda *a, _value=_value, **k: _value)
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state

    device.get_nccl_backend = lambda: "gloo"
    device.get_resource_name = lambda: "GPU"
    torch.cuda.get_device_capability = lambda *_: (8, 0)  # Trinity's _build_module asks
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.pin_memory = lambda self, *_: self  # FSDP2 calls it to offload the reference

    from verl.utils import distributed

    _initialize = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: (
        _initialize(timeout_second, backend or "gloo")  # its default: 'cpu:gloo,cpu:nccl'
    )
    from verl.workers.engine import EngineRegistry

    for _backends in EngineRegistry._engines.values():
        for _devices in _backends.values():
            _devices.setdefault("cpu", _devices.get("cuda"))

    from trinity.utils.distributed import WeightTransferEngine

    _create = WeightTransferEngine.create

    def _created(*args, **kwargs):
        from trinity_on_cpu.tcp import use_tcp

        use_tcp()
        return _create(*args, **kwargs)

    WeightTransferEngine.create = staticmethod(_created)
