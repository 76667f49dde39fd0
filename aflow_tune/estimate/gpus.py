"""`engine: trinity`: verl's trainer and vLLM's engines, for each GPU.

The trainer is verl 0.8.0's FSDP engine as Trinity 0.6.0 configures it. Sources:

- trinity/trainer/verl/config.py `_build_fsdp_engine_config`: `model_dtype` fp32, `fsdp_size` -1
  (all trainer GPUs), `reshard_after_forward`, gradient checkpointing, no fused kernels.
- verl/workers/engine/fsdp/transformer_impl.py: parameters are held in `model_dtype` and computed
  in bf16; a reference policy's shards stay in the machine's memory (CPUOffloadPolicy).
- trinity/trainer/verl/workers.py `_maybe_patch_lora_fsdp2`: under fsdp2 adapters are bf16.
- verl/workers/engine/base.py `BaseEngineCtx`: `param_offload` and `optimizer_offload` save nothing
  at the peak of a train step.
- Rajbhandari et al., ZeRO (arXiv:1910.02054): what each GPU keeps of the states.
- trinity/common/config_validator.py `GPUMemoryValidator._calc_fsdp_activation_memory`, whose
  coefficients its authors fitted with torch's profiler: logits and backward buffers.

vLLM takes `gpu_memory_utilization` of every GPU whatever the model is; what weights, the largest
forward pass and its own overhead leave becomes blocks of keys and values. So the question is
whether the blocks are enough:

- vllm/v1/worker/gpu_worker.py `determine_available_memory`: utilization x total - peak of a
  profiling run (weights, activations, what is not torch's).
- vllm/v1/kv_cache_interface.py: a block of one layer holds 2 x block_size x kv_heads x head_size
  elements; a layer with a sliding window needs window - 1 + the tokens of a forward pass, and one
  block (`SlidingWindowSpec`). Kwon et al., PagedAttention (arXiv:2309.06180).
- vllm/config/cache.py: block_size 16; vllm/config/scheduler.py: 2,048 tokens a forward pass and
  128 sequences where, as in Trinity's engine, the usage context names no others.

Which GPUs serve what follows Trinity's allocation (`RayClusterConfigValidator.
_set_gpu_allocation_info`): each engine gets tensor x pipeline x data parallel GPUs, the trainer all
that is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity.algorithm import ALGORITHM_TYPE

from aflow_tune.errors import BadInput, Fault
from aflow_tune.estimate.local import lora_of
from aflow_tune.estimate.needs import GIB, Need, Part
from aflow_tune.estimate.quantities import Known, Lengths, limits_of, worst
from aflow_tune.estimate.shapes import Lora, ModelShape, NamedModel, kept_per_token, widest_mlp

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

CUDA_CONTEXT = 1.0 * GIB
"""Allowance: CUDA's and NCCL's own memory in one process."""
PROCESS = 4.0 * GIB
"""Allowance: machine's memory of one process with CUDA, PyTorch and verl or vLLM loaded."""
VLLM_OVERHEAD = 1.5 * GIB
"""Allowance: CUDA, NCCL, captured graphs and the sampler's buffers of one GPU."""
USABLE = 0.9
"""Share of a GPU that an allocator that fragments can use; Trinity's own check takes 0.8, or 0.9
with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (`GPUMemoryValidator`)."""
_BF16, _FP32 = 2, 4
_DTYPES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}
_QUANTISED = {"fp8": 1.0, "bitsandbytes": 0.5 + 4 / 64}
"""Bytes of a linear layer's weight: one; 4-bit NF4 with an fp32 scale of every 64
(arXiv:2305.14314)."""


# -- the trainer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuTrainer:
    """What decides a trainer's memory. `gpus` of all nodes share one set of shards.

    tokens: computed by one GPU at once, padding included. offload: trainer.offload_policy, with
    fsdp2: states live in the machine's memory. held: bytes of a parameter (model_dtype).
    reference: a reference policy of its own is loaded (KL with full weights).
    """

    shape: ModelShape
    gpus: int
    per_node: int
    tokens: int
    lora: Lora | None = None
    fsdp2: bool = True
    offload: bool = False
    checkpointing: bool = True
    held: int = _FP32
    reference: bool = False
    critic: bool = False

    def states(self) -> tuple[float, float, float]:
        """Bytes of weights, gradients and Adam's two moments over all GPUs together."""
        whole = self.shape.parameters * self.held
        if self.lora is None:
            return whole, whole, 2 * whole
        adapter = self.lora.parameters(self.shape) * (_BF16 if self.fsdp2 else self.held)
        return whole + adapter, adapter, 2 * adapter

    def needs(self, limit: float | None, host: float | None, notes: list[str]) -> list[Need]:
        """The needs of one GPU, and of the machine's memory on one node.

        Args:
            limit: bytes of one GPU; None if not known.
            host: bytes of one machine's memory; None if not known.
        """
        if self.reference:
            notes = [*notes, "the reference policy's shards are kept in the machine's memory"]
        parts = tuple(part for part in self._gpu() if part.size)
        nodes = math.ceil(self.gpus / self.per_node)
        return [
            Need("trainer", "GPU", parts, self.gpus, limit, USABLE, notes=tuple(notes)),
            Need("trainer", "memory", tuple(self._host()), nodes, host),
        ]

    def _gpu(self) -> Iterator[Part]:
        shape, tokens = self.shape, self.tokens
        for role in ("policy", "critic") if self.critic else ("policy",):
            if not self.offload:
                shard = "" if self.gpus == 1 else f"1/{self.gpus} of it"
                names = ("weights", "gradients", "optimizer")
                for name, size in zip(names, self.states(), strict=True):
                    yield Part(f"{role} {name}", size / self.gpus, shard)
        # Layers gathered in bf16: the one at work and the next, and the root's embedding and head.
        # Their gradients exist once in bf16 and once in fp32, in which they are reduced
        # (MixedPrecisionPolicy: param_dtype bf16, reduce_dtype fp32), unless they are frozen.
        layer = max(block.parameters for block in shape.blocks)
        root = shape.parameters - shape.block_parameters
        reduced = 0 if self.lora else (_BF16 + _FP32) * max(layer, root)
        gathered = _BF16 * (2 * layer + root) + reduced
        yield Part("gathered layers", gathered, "bf16 copies of the layers at work")
        kept = [kept_per_token(shape, block, _BF16, self.lora) for block in shape.blocks]
        activations, note = sum(kept), "all layers"
        if self.checkpointing:
            activations = _BF16 * shape.hidden * shape.layers + max(kept)
            note = "checkpointed: layer inputs and one layer"
        yield Part("activations", tokens * activations, f"{tokens} tokens, {note}")
        # Logits in bf16 with what cross entropy makes of them, or the buffers of the backward
        # pass: 10 N V, and 4 V H + 80 N H (Trinity's `GPUMemoryValidator`, bf16).
        logits = 10 * tokens * shape.vocabulary
        backward = 4 * shape.vocabulary * shape.hidden + 80 * tokens * shape.hidden
        yield Part("logits and backward buffers", max(logits, backward), f"{tokens} tokens")
        yield Part("CUDA and NCCL", CUDA_CONTEXT, "allowance", allowance=True)

    def _host(self) -> Iterator[Part]:
        """Every process imports PyTorch and verl. The model is read in `model_dtype` before it is
        sharded: by every process of a node where embedding and head are tied, else by the first
        alone (verl/utils/fsdp_utils.py `get_init_weight_context_manager`)."""
        processes = min(self.gpus, self.per_node)
        weights, on_node = self.shape.parameters * self.held, processes / self.gpus
        yield Part("processes", processes * PROCESS, f"{processes}, allowance", allowance=True)
        yield Part("weights while loading", (processes if self.shape.tied else 1) * weights)
        if self.offload:
            yield Part("offloaded states", sum(self.states()) * on_node)
        if self.reference:
            yield Part("reference policy", weights * on_node)


def _trainer(
    config: AflowConfig, shape: ModelShape, lengths: Lengths, gpus: tuple[int, int, int]
) -> tuple[GpuTrainer, list[str]]:
    """What the trainer is set to, with notes. `gpus`: in all, of a node, taken by the engines."""
    all_gpus, per_node, engines = gpus
    where, trainer = config.positions.where, config.trainer
    lora, faults = lora_of(config), []
    if not trainer.trainer_strategy.startswith("fsdp"):
        cure = "trainer_strategy: fsdp2, or measure a short run"
        place = where("trainer.trainer_strategy")
        faults.append(Fault(place, "fsdp or fsdp2", trainer.trainer_strategy, cure))
    if lora is not None and any(block.experts for block in shape.blocks):
        # PEFT adapts the fused tensors of experts, in ways that depend on its version.
        cure = "train the full weights, or estimate with a dense model"
        place = where("model.lora_configs")
        faults.append(Fault(place, "no adapter on a mixture of experts", "one", cure))
    own = 1 if config.mode == "colocate" else all_gpus - engines
    if own < 1:
        cure = f"--gpus {engines + 1}, or fewer explorer.rollout_model.engine_num"
        found = f"{all_gpus} in all, {engines} of them for the engines"
        place = where("explorer.rollout_model.engine_num")
        faults.append(Fault(place, "at least one GPU for the trainer", found, cure))
    if faults:
        raise BadInput("This trainer cannot be estimated.", faults)
    algorithm = ALGORITHM_TYPE.get(config.algorithm.algorithm_type)
    fsdp = _verl_settings(trainer.trainer_config, "actor", "fsdp_config")
    model = _verl_settings(trainer.trainer_config, "model")
    longest = limits_of(config)[2]
    parallel = max(1, trainer.ulysses_sequence_parallel_size)
    tokens = trainer.max_token_len_per_gpu or math.ceil(2 * longest / parallel)
    padding, notes = 1.0, []
    if not trainer.use_remove_padding:
        # verl fills a micro-batch by the tokens that count (verl/utils/seqlen_balancing.py
        # `rearrange_micro_batches`); Trinity then pads each of its T / mean rows to the longest
        # (trinity/trainer/verl/monkey_patch.py `prepare_model_inputs`).
        mean = min(longest, lengths.prompt.ceiling() + lengths.response.ceiling())
        padding = max(1.0, min(longest, lengths.longest_prompt + lengths.longest_response) / mean)
        known = worst(lengths.prompt, lengths.response) in (Known.MEASURED, Known.COUNTED)
        notes.append(
            "use_remove_padding: false pads rows to the longest of their micro-batch: "
            f"{'' if known else 'at least '}{padding:.1f} tokens computed for each that counts"
        )
    fsdp2 = trainer.trainer_strategy == "fsdp2"
    settings = GpuTrainer(
        shape,
        own,
        per_node,
        math.ceil(tokens * padding),
        lora,
        fsdp2,
        fsdp2 and bool(fsdp.get("offload_policy", trainer.offload_policy)),
        bool(model.get("enable_gradient_checkpointing", True)),
        _DTYPES.get(str(fsdp.get("model_dtype", "fp32")), _FP32),
        # Trinity loads one by the algorithm alone (trinity/trainer/verl/trainer.py).
        bool(algorithm.use_reference) and lora is None,
        bool(algorithm.use_critic),
    )
    return settings, notes


def _verl_settings(settings: Any, *path: str) -> Mapping[str, Any]:
    """A section of `trainer.trainer_config`, in verl's flat form or below actor_rollout_ref."""
    at: Any = settings if isinstance(settings, dict) else {}
    at = {**at, **(at.get("actor_rollout_ref") or {})}
    for name in path:
        at = at.get(name) or {}
    return at


# -- the engines ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One kind of rollout engine. Replicas of data parallelism count as engines."""

    role: str
    shape: ModelShape
    engines: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    utilization: float = 0.9
    max_length: int = 4096
    itemsize: int = 2
    kv_itemsize: int = 2
    quantization: str | None = None
    lora: Lora | None = None
    block_size: int = 16
    forward_tokens: int = 2048
    sequences: int = 128

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.tensor_parallel * self.pipeline_parallel

    def weight_bytes(self) -> float:
        """Bytes of the weights over all GPUs of an engine; embeddings are never quantised."""
        shape = self.shape
        held = _QUANTISED[self.quantization] if self.quantization else float(self.itemsize)
        experts = sum(block.experts * block.expert for block in shape.blocks)
        quantised = shape.linear_parameters + experts
        return quantised * held + (shape.parameters - quantised) * self.itemsize

    def token_bytes(self) -> float:
        """Bytes of one token's keys and values on one GPU.

        Tensor parallelism divides the heads of keys and values; below one head a GPU they are
        replicated (vllm/model_executor/models/llama.py). Pipeline parallelism divides the layers.
        """
        heads = max(1.0, self.shape.kv_heads / self.tensor_parallel)
        layers = self.shape.layers / self.pipeline_parallel
        return 2 * heads * self.shape.head_dim * layers * self.kv_itemsize

    def sequence_bytes(self) -> float:
        """Bytes of one sequence of full length in whole blocks, on one GPU."""
        blocks = 0
        for layer in self.shape.blocks:
            seen = math.inf if layer.window is None else layer.window - 1 + self.forward_tokens
            extra = 1 if seen < self.max_length else 0
            blocks += math.ceil(min(seen, self.max_length) / self.block_size) + extra
        return blocks * self.token_bytes() / self.shape.layers * self.block_size

    def need(self, limit: float | None) -> Need:
        """The need of one GPU of an engine. Without `limit` the cache is the least that works: one
        sequence of full length."""
        fixed = tuple(self._fixed())
        if limit is None:
            note = "one sequence of full length"
            one = Part("keys and values", self.sequence_bytes(), note)
            return Need(self.role, "GPU", (*fixed, one), count=self.gpus)
        free = max(0.0, self.utilization * limit - sum(part.size for part in fixed))
        token, refusal = self.token_bytes(), None
        blocks = math.floor(free / (self.block_size * token))
        tokens, sequences = blocks * self.block_size, free / self.sequence_bytes()
        note = (
            f"{token / 1024:,.0f} KiB a token: {tokens:,} tokens, or {sequences:.1f} "
            f"sequences of {self.max_length:,}"
        )
        if sequences < 1:
            refusal = (
                f"vLLM would not start: {tokens:,} tokens of cache are fewer than one sequence "
                f"of {self.max_length:,}"
            )
        kv = Part("keys and values", tokens * token, f"{blocks:,} blocks of {self.block_size}")
        # vLLM fills its share exactly; graphs and other processes live in the rest.
        share = max(self.utilization, 0.0)
        return Need(self.role, "GPU", (*fixed, kv), self.gpus, limit, share, refusal, (note,))

    def _fixed(self) -> Iterator[Part]:
        shape, split = self.shape, self.tensor_parallel * self.pipeline_parallel
        yield Part("weights", self.weight_bytes() / split, self.quantization or "")
        if self.lora is not None:
            size = self.lora.parameters(shape) * self.itemsize / split
            yield Part("adapter", size, f"rank {self.lora.rank}")
        # The peak of the profiling run. A token holds the residual stream twice, and the larger of
        # the attention's and the MLP's inner rows; the sampler holds the logits of every sequence
        # in the model's type and twice in fp32.
        attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        inner = max(attention, 3 * widest_mlp(shape)) / self.tensor_parallel
        rows = self.forward_tokens * self.itemsize * (2 * shape.hidden + inner)
        logits = self.sequences * shape.vocabulary * (self.itemsize + 2 * _FP32)
        yield Part("forward pass", rows + logits, f"{self.forward_tokens} tokens")
        yield Part("CUDA and vLLM", VLLM_OVERHEAD, "allowance", allowance=True)


def _engines(
    config: AflowConfig, policy: NamedModel, auxiliary: tuple[NamedModel, ...]
) -> list[Engine]:
    """The rollout engines, and those of each auxiliary model."""
    explorer, where = config.explorer, config.positions.where
    if config.mode not in ("both", "explore", "bench", "serve", "colocate"):
        return []
    named = []
    if explorer.rollout_model.engine_type != "external":
        key = "explorer.rollout_model"
        named.append((explorer.rollout_model, key, "rollout", policy, lora_of(config)))
    for number, other in enumerate(auxiliary):
        model, key = explorer.auxiliary_models[number], f"explorer.auxiliary_models.{number}"
        named.append((model, key, model.name or f"auxiliary model {number}", other, None))
    found: list[Engine] = []
    faults: list[Fault] = []
    for model, key, role, one, lora in named:
        extra = dict(model.extra_engine_args or {})
        quantization = extra.get("quantization")
        if not model.engine_type.startswith("vllm"):
            cure = "remove engine_type, or measure a short run"
            faults.append(Fault(where(f"{key}.engine_type"), "vllm", model.engine_type, cure))
        if quantization is not None and quantization not in _QUANTISED:
            place = where(f"{key}.extra_engine_args.quantization")
            expected = "none, " + " or ".join(_QUANTISED)
            faults.append(Fault(place, expected, repr(quantization), "measure a short run instead"))
        itemsize = _DTYPES.get(str(model.dtype), 2)
        short = str(extra.get("kv_cache_dtype", "auto")).startswith(("fp8", "int8"))
        engine = Engine(
            role,
            one.shape,
            model.engine_num * model.data_parallel_size,
            model.tensor_parallel_size,
            model.pipeline_parallel_size,
            float(model.gpu_memory_utilization),
            int(model.max_model_len or limits_of(config)[2]),
            itemsize,
            1 if short else itemsize,
            quantization,
            lora,
            int(extra.get("block_size") or Engine.block_size),
            int(extra.get("max_num_batched_tokens") or Engine.forward_tokens),
            int(extra.get("max_num_seqs") or Engine.sequences),
        )
        found.append(engine)
    if faults:
        raise BadInput("These engines cannot be estimated.", faults)
    return found


# -- both ----------------------------------------------------------------------------------


def gpus_of(config: AflowConfig, gpus: int | None) -> tuple[int, int] | None:
    """The GPUs that the run would have, in all and on a node: as said, else as configured."""
    cluster = config.cluster
    if gpus is not None:
        return gpus, min(gpus, cluster.gpu_per_node or gpus)
    if cluster.node_num and cluster.gpu_per_node:
        return cluster.node_num * cluster.gpu_per_node, cluster.gpu_per_node
    return None


def gpu_needs(
    config: AflowConfig,
    models: tuple[NamedModel, ...],
    lengths: Lengths,
    gpus: tuple[int, int] | None,
    limit: float | None,
    host: float | None,
) -> tuple[list[Need], int]:
    """The needs of trainer and engines, and the GPUs that are paid for.

    Args:
        models: the policy and the auxiliary models.
        gpus: as `gpus_of` has it; None: one for the trainer beside those of the engines.
        limit: bytes of a GPU; None if not known.
        host: bytes of a machine's memory; None if not known.

    Raises:
        BadInput: a strategy, a quantisation or an engine type that is not counted.
    """
    policy, *auxiliary = models
    engines = _engines(config, policy, tuple(auxiliary))
    taken = sum(engine.gpus for engine in engines)
    all_gpus, per_node = gpus or (taken + 1, taken + 1)
    needs = []
    if config.mode in ("both", "train", "colocate"):
        trainer, notes = _trainer(config, policy.shape, lengths, (all_gpus, per_node, taken))
        needs += trainer.needs(limit, host, notes)
    needs += [engine.need(limit) for engine in engines]
    if config.mode == "colocate":  # engine and trainer share one GPU, so their needs add up
        on_gpu = [need for need in needs if need.place == "GPU"]
        both = Need(
            "rollout and trainer, colocated",
            "GPU",
            tuple(part for need in on_gpu for part in need.parts),
            limit=limit,
            refusal=next((need.refusal for need in on_gpu if need.refusal), None),
            notes=tuple(note for need in on_gpu for note in need.notes),
        )
        needs = [both, *(need for need in needs if need.place != "GPU")]
    return needs, all_gpus
