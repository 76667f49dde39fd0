"""What Trinity's own engines cannot do, asked only when they were chosen.

**Quantised loading.** vLLM can hold the sampler's weights in 8 or 4 bits: `quantization: fp8` and
`quantization: bitsandbytes` in `explorer.rollout_model.extra_engine_args`, which quantise a model
of 16 bits while it is loaded. That is of use only for a base that stays as it is, with LoRA: else
16-bit weights arrive after every step. verl 0.8.0 cannot: its FSDP engine loads with a plain
`from_pretrained` and then casts every parameter to one floating-point type, which quantised
parameters are not. It halves the base by `model_dtype: bfloat16` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aflow_tune.data.checks import Findings
from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

TRAINING = ("both", "train", "colocate")
BF16_BASE = "trainer.trainer_config: {actor: {fsdp_config: {model_dtype: bfloat16}}}"
MAX_RANK = 512
_SAMPLER = "explorer.rollout_model.extra_engine_args"
_QUANTISING = ("quantization", "load_in_4bit", "load_in_8bit", "bnb_")
_AWARE_TRAINING = "qat"
"""verl's training for a quantised deployment, which itself computes in 16 bits."""


def check_cluster(config: AflowConfig) -> Findings:
    """Faults and warnings that only hold for `engine: trinity`."""
    found = Findings()
    found.faults += _one_gpu(config)
    found.faults += _trainer(config)
    found.faults += _adapter(config)
    found.add(_sampler(config))
    return found


def _one_gpu(config: AflowConfig) -> Iterable[Fault]:
    cluster = config.cluster
    if config.mode == "both" and cluster.node_num == cluster.gpu_per_node == 1:
        yield Fault(
            config.positions.where("mode"),
            "a GPU for the sampler and one for the trainer",
            "both, on one GPU",
            "mode: colocate",
        )


def _trainer(config: AflowConfig) -> Iterable[Fault]:
    if config.mode not in TRAINING or config.model.tinker.enable:
        return
    for key, value in quantising(config.trainer.trainer_config, "trainer.trainer_config"):
        yield Fault(
            config.positions.where(key),
            "nothing: verl loads in full precision and casts all parameters to one type, which "
            "quantised ones cannot be",
            f"{key.rpartition('.')[2]}: {value}",
            f"remove it; {BF16_BASE} takes half the memory of the default",
        )


def _adapter(config: AflowConfig) -> Iterable[Fault]:
    for number, lora in enumerate(config.model.lora_configs or []):
        if not 0 < lora.lora_rank <= MAX_RANK:
            key = f"model.lora_configs.{number}.lora_rank"
            expected = f"1 to {MAX_RANK}: vLLM has no kernels for more"
            where = config.positions.where(key)
            yield Fault(where, expected, str(lora.lora_rank), "lora_rank: 64, or full weights")


def _sampler(config: AflowConfig) -> Findings:
    found = Findings()
    arguments = config.explorer.rollout_model.extra_engine_args
    kind = arguments.get("quantization")
    if kind is None or config.mode not in TRAINING:
        return found
    where = config.positions.where(f"{_SAMPLER}.quantization")
    if config.model.lora_configs is None:
        cure = "remove it, or train an adapter: model: {lora_configs: [{lora_rank: 16}]}"
        expected = (
            "16 bits: the trained weights arrive so after every step (only LoRA's base stays)"
        )
        found.faults.append(Fault(where, expected, repr(kind), cure))
        return found
    found.warnings.append(
        f"{where}: the sampler's base is {kind}, the trainer's is not: they give one answer "
        "slightly different probabilities, which the loss sees as a policy that is a little old"
    )
    return found


def quantising(value: Any, key: str) -> Iterable[tuple[str, Any]]:
    """Keys that ask for quantised weights, at any depth."""
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        path, word = f"{key}.{name}", str(name)
        if word == _AWARE_TRAINING or inner in (None, False):
            continue
        if word.startswith(_QUANTISING):
            yield path, inner if not isinstance(inner, Mapping) else "..."
        else:
            yield from quantising(inner, path)
