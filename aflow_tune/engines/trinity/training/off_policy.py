"""Learning from rollouts of earlier policies: GiGPO with anchors of a search, a loss with truncated
importance weights, and a reader of batches in files.

    algorithm: {advantage_fn: workflow_gigpo, policy_loss_fn: truncated_importance}

`config.names` spells these names out. The two functions serve any run; the reader is the data of a
`mode: train` run on one file a step. `running/learning.py` writes such files for a search.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trinity.algorithm import ADVANTAGE_FN
from trinity.algorithm.advantage_fn.gigpo_advantage import GiGPOAdvantageFn
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss, masked_mean
from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import StorageConfig
from trinity.common.experience import EID, Experience, group_by

from aflow_tune.config.names import WORKFLOW_GIGPO
from aflow_tune.errors import BadInput, Fault

SEARCH_ANCHOR = "search_anchor"
"""Key of `Experience.info`: the anchor group in a search, such as the parent in its tree."""
_MOST_FAULTS = 5


class WorkflowGiGPO(GiGPOAdvantageFn):
    """A = A_E + omega * A_S (Feng et al., arXiv:2505.10978). A_E: the run's reward relative to the
    runs of its task. A_S: the discounted return from a step on, relative to all steps with the same
    anchor: `info["search_anchor"]`, else the `env_state_hash` that the adapter gives every call.

    Relative is the difference to the mean, and with `fnorm: std` divided by the sample's standard
    deviation + `epsilon`. Alone in its group, a value has nothing to be compared with: 0 (Trinity's
    GiGPO takes the raw reward for A_E). `gamma` is below 1 by default: with 1, a first state that
    all runs of a task share would count the same comparison twice.
    """

    def __init__(
        self, omega: float = 1.0, gamma: float = 0.95, fnorm: str = "none", epsilon: float = 1e-6
    ) -> None:
        super().__init__(omega, gamma, fnorm, epsilon)

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """Set `advantages` and `returns` of all; the metrics are named as by Trinity's GiGPO."""
        if not exps:
            return [], {}
        returns: dict[int, float] = {}
        of_run: dict[str, float] = {}
        for of_task in group_by(exps, "task").values():
            rewards: dict[str, float] = {}
            for run, steps in group_by(of_task, "run").items():
                steps = self._sort_run_steps(steps)
                of_steps = self._step_rewards(steps)
                rewards[run] = sum(of_steps)
                discounted = self._discounted_returns(of_steps, self.gamma)
                returns |= {id(exp): found for exp, found in zip(steps, discounted, strict=True)}
            of_run |= zip(rewards, self._relative(list(rewards.values())), strict=True)
        anchored: dict[tuple[str, str], list[Experience]] = defaultdict(list)
        for exp in exps:
            for key in (SEARCH_ANCHOR, self.env_state_hash_key):
                if (anchor := exp.info.get(key)) is not None:
                    anchored[key, str(anchor)].append(exp)
                    break
        of_step = dict.fromkeys(map(id, exps), 0.0)
        for group in anchored.values():
            relative = self._relative([returns[id(exp)] for exp in group])
            of_step |= {id(exp): found for exp, found in zip(group, relative, strict=True)}
        for exp in exps:
            self._apply_mask(exp, of_run[exp.eid.rid] + self.omega * of_step[id(exp)])
        shared = sum(len(group) > 1 for group in anchored.values())
        metrics = {
            "gigpo/anchor_groups_total": len(anchored),
            "gigpo/anchor_groups_size_gt1": shared,
            "gigpo/anchor_group_hit_ratio": shared / max(1, len(anchored)),
            "gigpo/mean_abs_A_E": statistics.fmean(abs(of_run[exp.eid.rid]) for exp in exps),
            "gigpo/mean_abs_A_S": statistics.fmean(map(abs, of_step.values())),
            "experience_count": len(exps),
        }
        return exps, {name: float(value) for name, value in metrics.items()}

    def _relative(self, values: Sequence[float]) -> list[float]:
        if len(values) < 2:
            return [0.0] * len(values)
        mean = statistics.fmean(values)
        scale = statistics.stdev(values) + self.epsilon if self.fnorm == "std" else 1.0
        return [(value - mean) / scale for value in values]

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"omega": 1.0, "gamma": 0.95, "fnorm": "none", "epsilon": 1e-6}


class TruncatedImportance(PolicyLossFn):
    """-min(pi / mu, cap) A log pi, the weight detached: the policy gradient on samples of an
    earlier policy mu, whose log-probabilities are `old_logprob`. The truncation bounds the variance
    and costs a bias (Espeholt et al., arXiv:1802.01561).

    `level`: `token` weighs each token by its own ratio, `sequence` all tokens by the geometric mean
    of the sequence's ratios. The weights depend on a row alone, and rows are added up and divided
    by something that depends on masks only, as the local trainer asks.
    """

    def __init__(
        self,
        backend: str = "verl",
        cap: float = 2.0,
        level: str = "token",
        loss_agg_mode: str = "token-mean",
    ) -> None:
        super().__init__(backend=backend)
        if level not in ("token", "sequence") or not cap > 0:
            raise ValueError("TruncatedImportance: level is token or sequence, cap is above 0")
        self.cap, self.level, self.loss_agg_mode = cap, level, loss_agg_mode

    def weights(self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor) -> Tensor:
        """The truncated weights, [B, R] as the arguments; 0 where nothing was sampled."""
        ratios_BR = (logprob - old_logprob).detach().float()
        if self.level == "sequence":
            means_B = masked_mean(ratios_BR, action_mask, axis=-1)
            ratios_BR = means_B.unsqueeze(-1).expand_as(ratios_BR)
        return torch.exp(ratios_BR.clamp(max=math.log(self.cap))) * action_mask

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        weights_BR = self.weights(logprob, old_logprob, action_mask)
        losses_BR = -weights_BR * advantages * logprob
        loss = aggregate_loss(losses_BR, action_mask, loss_agg_mode=self.loss_agg_mode)
        log_ratios_BR = (logprob - old_logprob).detach()
        capped_BR = (weights_BR >= self.cap * (1 - 1e-6)).float()
        means = {
            "importance/mean": masked_mean(weights_BR, action_mask),
            "importance/truncated": masked_mean(capped_BR, action_mask),
            "ppo_kl": masked_mean(-log_ratios_BR, action_mask),
        }
        metrics = {name: float(value) for name, value in means.items()}
        return loss, {"pg_loss": float(loss.detach()), **metrics}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"cap": 2.0, "level": "token", "loss_agg_mode": "token-mean"}


class BatchFiles(BufferReader):
    """Batches from a folder of JSONL files: in the order of their names, each file is one train
    step, and after the last comes the first again. One line is one answer of a policy:

        {"group": "p3", "anchor": "9af1", "run": 0, "tokens": [1, 5, 9], "prompt_length": 1,
         "logprobs": [-0.2, -1.3], "reward": 0.25, "policy_version": 4}

    `group` is what A_E compares in, `anchor` (null or empty: none) what A_S compares in; `logprobs`
    are the log-probabilities of the response under the policy that sampled it, at the trainer's
    temperature. Advantages are computed when a file is read, over all of its rows, by
    `data_selector.kwargs`: `advantage_fn` and `advantage_fn_args` (WorkflowGiGPO without; the run
    fills in those of `algorithm`).

    Raises BadInput when made: no file, or a row that cannot be learned from. A row without
    log-probabilities of its own policy has no importance weight: it is refused, never guessed.
    """

    def __init__(self, config: StorageConfig) -> None:
        chosen = config.data_selector.kwargs
        function = ADVANTAGE_FN.get(chosen.get("advantage_fn", WORKFLOW_GIGPO))
        self.advantage = function(**(chosen.get("advantage_fn_args") or {}))
        self.index = config.index
        self.files = sorted(Path(str(config.path)).glob("*.jsonl"))
        faults = [] if self.files else [_no_files(str(config.path))]
        for number, file in enumerate(self.files):
            faults += _rows(file, number)[1][:_MOST_FAULTS]
        if faults:
            raise BadInput("These batches cannot be learned from.", faults[:_MOST_FAULTS])

    def __len__(self) -> int:
        return len(self.files)

    async def read(self, batch_size: int | None = None, **kwargs: Any) -> list[Experience]:
        """The next file's rows with their advantages; `batch_size` is not heeded."""
        number = self.index % len(self.files)
        rows, faults = _rows(self.files[number], self.index)
        if faults:
            raise BadInput("A batch has changed since the start.", faults[:_MOST_FAULTS])
        self.index += 1
        if self.advantage.compute_in_trainer():
            return rows
        exps: list[Experience] = self.advantage.process(rows)[0]
        return exps

    def state_dict(self) -> dict[str, int]:
        return {"current_index": self.index}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.index = state_dict["current_index"]


def _no_files(path: str) -> Fault:
    key, expected = "buffer.trainer_input.experience_buffer.path", "a folder of .jsonl batches"
    return Fault(key, expected, f"none in {path}", "name the folder that holds them")


def _rows(file: Path, batch: int) -> tuple[list[Experience], list[Fault]]:
    """The experiences of one file, `batch` in their ids; and a fault for each unusable line."""
    found, faults = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(_experience(json.loads(line), batch))
        except (ValueError, TypeError, KeyError) as error:
            missing = isinstance(error, KeyError)
            told = f"no field {error}" if missing else str(error)
            place, fix = f"{file.resolve()}:{number}", "write the row anew, or remove its group"
            faults.append(Fault(place, "a recorded answer of a policy", told, fix))
    if not found and not faults:
        place, fix = str(file.resolve()), "remove the file"
        faults.append(Fault(place, "at least one recorded answer", "an empty file", fix))
    return found, faults


def _experience(row: dict[str, Any], batch: int) -> Experience:
    """Raises ValueError, TypeError, KeyError: it is no row as `BatchFiles` describes."""
    tokens, prompt, logprobs = row["tokens"], int(row["prompt_length"]), row["logprobs"]
    reward = float(row["reward"])
    if not logprobs:
        raise ValueError("no log-probabilities of the policy that wrote it")
    if not 0 < prompt < len(tokens) or len(logprobs) != len(tokens) - prompt:
        told = f"{len(tokens)} tokens, a prompt of {prompt}, {len(logprobs)} log-probabilities"
        raise ValueError(told)
    if not all(map(math.isfinite, [reward, *logprobs])) or max(logprobs) > 1e-3:
        raise ValueError("a reward or log-probability that is none")
    info: dict[str, Any] = {"model_version": int(row["policy_version"])}
    if row["anchor"]:
        info[SEARCH_ANCHOR] = str(row["anchor"])
    return Experience(
        eid=EID(batch=batch, task=str(row["group"]), run=int(row["run"])),
        tokens=torch.tensor(tokens, dtype=torch.int32),
        prompt_length=prompt,
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        reward=reward,
        info=info,
    )
