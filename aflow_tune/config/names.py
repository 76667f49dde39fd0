"""Our classes under short names, beside those of Trinity's registries.

Every process has registries of its own. So `spell_out` replaces a short name by the dotted path,
which Trinity's registries import wherever they are asked: in this process, on Ray, in verl.
"""

from __future__ import annotations

from trinity.common.config import AlgorithmConfig

from aflow_tune.config.settings import AflowConfig

_HOME = "aflow_tune.engines.trinity.training.off_policy"
WORKFLOW_GIGPO = f"{_HOME}.WorkflowGiGPO"
TRUNCATED_IMPORTANCE = f"{_HOME}.TruncatedImportance"
BATCH_FILES = f"{_HOME}.BatchFiles"
PAIR_LOSS = "aflow_tune.engines.trinity.training.pair_loss.PairLoss"

SHORT_NAMES = {
    "advantage_fn": {"workflow_gigpo": WORKFLOW_GIGPO},
    "policy_loss_fn": {"truncated_importance": TRUNCATED_IMPORTANCE, "pair_loss": PAIR_LOSS},
}
"""Dotted path by short name, for settings of `algorithm`."""
STORAGE_NAMES = {"batch_files": BATCH_FILES}
"""The same for `buffer.trainer_input.experience_buffer.storage_type`."""


def spell_out(config: AflowConfig) -> None:
    """Replace short names by dotted paths. A function of ours without arguments gets its own
    defaults: Trinity fills in those of the algorithm's usual function. DPO's loss is ours."""
    algorithm, buffer = config.algorithm, config.buffer.trainer_input.experience_buffer
    for setting, names in SHORT_NAMES.items():
        given, arguments = getattr(algorithm, setting), f"{setting}_args"
        path = names.get(given, given)
        if setting == "policy_loss_fn" and algorithm.algorithm_type == "dpo":
            path = PAIR_LOSS if given in (None, "dpo") else path
        if path in names.values():
            setattr(algorithm, setting, path)
            if getattr(algorithm, arguments) is None:
                from trinity import algorithm as known  # takes a second

                registry = getattr(known, setting.upper())
                setattr(algorithm, arguments, registry.get(path).default_args())
    if buffer is not None:
        buffer.storage_type = STORAGE_NAMES.get(buffer.storage_type, buffer.storage_type)


def by_anchors(algorithm: AlgorithmConfig) -> bool:
    """Whether steps are compared within anchor groups: Trinity's GiGPO, or ours."""
    chosen = algorithm.advantage_fn or algorithm.algorithm_type
    return chosen in ("gigpo", WORKFLOW_GIGPO, *SHORT_NAMES["advantage_fn"])
