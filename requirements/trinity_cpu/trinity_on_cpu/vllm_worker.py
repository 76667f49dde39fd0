"""Trinity's vLLM worker on top of vLLM's CPU worker."""

from vllm.v1.worker.cpu_worker import CPUWorker  # first: it sets up shared memory

# isort: split
from trinity.common.models.vllm_worker import TrinityGPUWorker

from trinity_on_cpu.tcp import use_tcp


class TrinityCPUWorker(TrinityGPUWorker, CPUWorker):
    def load_model(self, *args, **kwargs):
        use_tcp()
        return super().load_model(*args, **kwargs)
