"""The thread on which a policy and its trainer compute, in turns.

OpenMP keeps a pool of workers for each thread that ever ran a parallel operation. With more workers
than cores, those that wait for the next operation sleep at once instead of looking out for it: an
idle second pool slows a decode step by a fifth on two cores
(`benchmarks/sampling_beside_programs.py`). A frozen model, which samples at the same time as the
policy, has a thread of its own: taking turns, both would be slower.
"""

from concurrent.futures import ThreadPoolExecutor

COMPUTE = ThreadPoolExecutor(1, thread_name_prefix="compute")
