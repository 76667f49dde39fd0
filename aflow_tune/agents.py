"""Training and evaluating agents that use tools, under the names that their users know.

    config = AgentSFTConfig(base_model="smollm2-135m", data="my_data", output="runs/agent")
    AgentSFTTrainer(config).train()

Each class is a part of one YAML: `as_yaml` shows it, and what runs is that file, as by `aflow-tune
FILE`. What a key means stands in docs/training_yaml.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput
from aflow_tune.types import TuneResult

if TYPE_CHECKING:
    from aflow_tune.engines.local.chat import Rendered
    from aflow_tune.evaluation.columns import Request
    from aflow_tune.evaluation.results import Result

METHODS = ("sft", "dpo", "ppo", "grpo")
CONFIG_NAME = "agent.yaml"


@dataclass
class CoresetSelector:
    """`coreset:`, part of the dialogues to learn from. `size`: a share below 1, or a count."""

    size: float | None = None
    strategy: str = "hybrid"
    seed: int | None = None

    def as_yaml(self) -> dict[str, Any]:
        return {} if self.size is None else {"coreset": _given(vars(self))}


@dataclass
class OnlineContinualLearner:
    """`replay:`, rehearsal of earlier rounds from a buffer that runs share."""

    buffer: str | Path | None = None
    ratio: float = 0.1
    rounds: Sequence[str] = ()
    capacity: int | None = None

    def as_yaml(self) -> dict[str, Any]:
        if self.buffer is None:
            return {}
        told = {"buffer": str(self.buffer), "ratio": self.ratio, "capacity": self.capacity}
        return {"replay": _given(told | {"from": list(self.rounds) or None})}


@dataclass
class AgentRewardConfig:
    """`rewards.turns:`, the weights of an answer's measures, together 1 (docs/agents.md). Those
    that are not named weigh nothing; empty: the defaults."""

    weights: Mapping[str, float] = field(default_factory=dict)

    def turns(self) -> dict[str, float]:
        """The weight of every measure; empty for the defaults."""
        from aflow_tune.scoring.turns import MEASURES

        return {name: self.weights.get(name, 0.0) for name in MEASURES} if self.weights else {}

    def as_yaml(self) -> dict[str, Any]:
        return {"rewards": {"turns": self.turns()}} if self.weights else {}


class AgentRewardModel:
    """The reward of an answer of the assistant, in [0, 1]."""

    def __init__(self, config: AgentRewardConfig | None = None) -> None:
        self.config = config or AgentRewardConfig()

    def measures(self, answer: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, float]:
        """Each measure that applies: see `scoring.turns.measures`."""
        from aflow_tune.scoring.turns import measures

        return measures(answer, task)

    def score(self, answer: Mapping[str, Any], task: Mapping[str, Any]) -> float:
        """The weighted measures of an OpenAI message for a dialogue that ends with the right one.
        Raises BadInput: the task cannot be read."""
        from aflow_tune.scoring.turns import turn_reward
        from aflow_tune.sections import TurnRewardSection

        return turn_reward(self.measures(answer, task), TurnRewardSection(**self.config.turns()))


class AgentSFTFormatter:
    """Dialogues as the tokens that are learned, by the chat template of a model."""

    def __init__(self, model: str = "smollm2-135m", *, catalogue: str | Path | None = None) -> None:
        from aflow_tune.data.catalogue import read_catalogue
        from aflow_tune.engines.local.chat import Renderer
        from aflow_tune.engines.local.models import end_tokens, load_tokenizer, resolve_model

        path = resolve_model(model)
        self.renderer = Renderer(load_tokenizer(path), end_tokens(path))
        tools = read_catalogue(Path(catalogue)) if catalogue else []
        self._catalogue = {tool.name: tool for tool in tools}

    def format(self, row: Mapping[str, Any], *, last_only: bool = False) -> list[Rendered]:
        """The sequences of a row of any known form. Raises ValueError: it cannot be learned."""
        from aflow_tune.data.dialogues import as_dialogue

        dialogue = as_dialogue(row, self._catalogue)
        return self.renderer.examples(dialogue["messages"], dialogue["tools"], last_only=last_only)


@dataclass
class AgentSFTConfig:
    """What `aflow-tune agent train` takes. `data`: a file of dialogues, or a folder with dialogues
    and perhaps a catalogue of tools and a benchmark. None: the engine's default."""

    base_model: str = "smollm2-135m"
    data: str | Path = "data"
    output: str | Path = "runs/agent"
    epochs: int = 1
    task_weights: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float = 2e-4
    batch_size: int = 16
    max_length: int = 1024
    max_response: int = 128
    lora_rank: int = 16
    lora_alpha: int = 32
    load_in: str | None = None
    seed: int = 0
    coreset: CoresetSelector = field(default_factory=CoresetSelector)
    replay: OnlineContinualLearner = field(default_factory=OnlineContinualLearner)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the YAML, which win."""

    def as_yaml(self) -> dict[str, Any]:
        """The configuration that this stands for. Raises BadInput: `data` is not what it should."""
        return _merged(_of(self, ("sft",)), dict(self.more))


@dataclass
class RLTrainingConfig(AgentSFTConfig):
    """As AgentSFTConfig, for `methods` one after the other: dpo, ppo, grpo, perhaps sft first.
    `num_samples`: answers to each turn, of which pairs or groups are made; `beta`: DPO's."""

    methods: Sequence[str] = ("grpo",)
    beta: float = 0.1
    num_samples: int = 4
    rl_learning_rate: float = 5e-5
    reward: AgentRewardConfig = field(default_factory=AgentRewardConfig)

    def as_yaml(self) -> dict[str, Any]:
        return _merged(_of(self, tuple(self.methods)), dict(self.more))


class AgentSFTTrainer:
    """Runs a configuration."""

    def __init__(self, config: AgentSFTConfig) -> None:
        self.config = config

    def write(self) -> Path:
        """Write the YAML into `output`. Returns its path; raises BadInput as `as_yaml`."""
        return write_yaml(self.config.as_yaml(), Path(self.config.output) / CONFIG_NAME)

    def train(self, *, inline: bool | None = True) -> TuneResult:
        """Train and evaluate; goes on where it was stopped. Raises as `tune()`."""
        from aflow_tune.tuning import run_config

        return run_config(self.write(), inline=inline)


class AgentRLTrainer(AgentSFTTrainer):
    """The same for an RLTrainingConfig."""


class AgentTrainingEvaluator:
    """Measures models on the benchmark of `data`, the first the one to compare with."""

    def __init__(self, config: AgentSFTConfig) -> None:
        self.config = config

    def write(self) -> Path:
        return write_yaml(_evaluated(self.config), Path(self.config.output) / "evaluate.yaml")

    def request(self, *models: str | Path, samples: int = 1) -> Request:
        """What `aflow-tune eval` is asked."""
        from aflow_tune.evaluation.columns import Request

        return Request(config=self.write(), checkpoints=tuple(map(str, models)), samples=samples)

    def evaluate(self, *models: str | Path, samples: int = 1) -> Result:
        """The measures of `config.base_model` and of each of `models` (a run folder, an adapter, a
        merged model), with paired intervals. Raises as `aflow-tune eval`."""
        from rich.console import Console

        from aflow_tune.evaluation.evaluate import EvalProgress, evaluate

        return evaluate(self.request(*models, samples=samples), EvalProgress(Console()))[0]


def write_yaml(content: Mapping[str, Any], path: Path) -> Path:
    """Write a configuration; returns its path."""
    from aflow_tune.files import write_whole

    write_whole(path, text_of(content))
    return path


def text_of(content: Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    import yaml

    return str(yaml.safe_dump(dict(content), sort_keys=False, width=100, allow_unicode=True))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _merged(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        inner = base.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            base[key] = _merged(inner, value)
        else:
            base[key] = value
    return base


def _common(config: AgentSFTConfig) -> tuple[dict[str, Any], list[Path]]:
    """The part of every YAML, and the files to learn from."""
    from aflow_tune.data.agent_data import find_agent_data

    data = find_agent_data(Path(config.data))
    output = Path(config.output).absolute()
    sets = [{"name": file.stem, "path": str(file.absolute())} for file in data.benchmark]
    catalogue = {"catalogue": str(data.catalogue.absolute())} if data.catalogue else {}
    lora = [{"lora_rank": config.lora_rank, "lora_alpha": config.lora_alpha}]
    content = {
        "project": output.parent.name or "runs",
        "name": output.name,
        "checkpoint_root_dir": str(output.parent.parent),
        "dialogues": {"as_tasks": True, **catalogue},
        "report": {"score": "end_to_end_success"},
        "seed": config.seed,
        "model": {
            "model_path": config.base_model,
            "max_model_len": config.max_length,
            "max_prompt_tokens": config.max_length - config.max_response,
            "max_response_tokens": config.max_response,
            "lora_configs": lora,
        },
        "buffer": {"explorer_input": {"eval_tasksets": sets}},
    }
    if config.load_in:
        content["local"] = {"load_in": config.load_in}
    return content, data.dialogues


def _evaluated(config: AgentSFTConfig) -> dict[str, Any]:
    content, _ = _common(config)
    if not content["buffer"]["explorer_input"]["eval_tasksets"]:
        title, expected = "There is nothing to evaluate on.", "a benchmark, or rows of a test split"
        raise BadInput.of(title, str(config.data), expected, "none", "see docs/agents.md")
    return {**content, "mode": "bench"}


def _of(config: AgentSFTConfig, methods: Sequence[str]) -> dict[str, Any]:
    """The YAML of one method, or of several as stages."""
    title = "The training cannot be set up."
    if not methods or (unknown := [method for method in methods if method not in METHODS]):
        found = unknown[0] if methods else "none"
        raise BadInput.of(title, "methods", f"one of {', '.join(METHODS)}", found, "name one")
    content, files = _common(config)
    if len(files) != 1:
        told = ", ".join(map(str, files)) or "none: all rows are a benchmark's"
        fix = "put all dialogues to learn from into one file"
        raise BadInput.of(title, str(config.data), "one file of dialogues", told, fix)
    path = str(files[0].absolute())
    if config.task_weights:
        content["dialogues"] = {**content["dialogues"], "task_weights": dict(config.task_weights)}
    content |= config.coreset.as_yaml() | config.replay.as_yaml()
    if isinstance(config, RLTrainingConfig):
        content |= config.reward.as_yaml()
    stages = [stage for method in methods for stage in _stages(config, method, path)]
    if len(stages) == 1:
        (stage,) = stages
        del stage["stage_name"]
        return _merged(content, stage)
    return {**content, "stages": stages}


def _stages(config: AgentSFTConfig, method: str, path: str) -> list[dict[str, Any]]:
    """The stages of a method: SFT and DPO learn from data, DPO after pairs were sampled."""
    rate = {"optimizer": {"lr": config.learning_rate}}
    if method == "sft":
        return [_from_data("sft", {"algorithm_type": "sft", **rate}, config, path)]
    assert isinstance(config, RLTrainingConfig)
    rate = {"optimizer": {"lr": config.rl_learning_rate}}
    tasks = {"taskset": {"name": "dialogues", "path": path}}
    if method == "dpo":
        sample = {
            "stage_name": "pairs",
            "mode": "pairs",
            "algorithm": {"repeat_times": config.num_samples},
            "buffer": {"batch_size": config.batch_size, "explorer_input": tasks},
        }
        # Without `rpo_alpha` the chosen calls sink with the rejected ones (docs/numbers.md).
        loss = {"beta": config.beta, "rpo_alpha": 1.0}
        learned = {"algorithm_type": "dpo", "policy_loss_fn_args": loss, **rate}
        learned["kl_loss_fn_args"] = {"kl_coef": 0.0}
        return [sample, _from_data("dpo", learned, config, "stage://pairs/pairs.jsonl")]
    kind = {"ppo": "ppo", "grpo": "multi_step_grpo"}[method]
    return [
        {
            "stage_name": method,
            "mode": "both",
            "algorithm": {"algorithm_type": kind, "repeat_times": config.num_samples, **rate},
            "buffer": {
                "batch_size": config.batch_size,
                "total_epochs": config.epochs,
                "explorer_input": tasks,
            },
        }
    ]


def _from_data(
    name: str, algorithm: Mapping[str, Any], config: AgentSFTConfig, path: str
) -> dict[str, Any]:
    rows: dict[str, Any] = {"name": "dialogues", "storage_type": "file", "path": path}
    rows["data_selector"] = {"selector_type": "shuffle", "seed": config.seed}
    return {
        "stage_name": name,
        "mode": "train",
        "algorithm": dict(algorithm),
        "buffer": {
            "train_batch_size": config.batch_size,
            "total_epochs": config.epochs,
            "trainer_input": {"experience_buffer": rows},
        },
    }
