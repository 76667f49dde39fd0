"""Our sections of the configuration, beside Trinity's own, and where every key was written.

Plain dataclasses: this module imports neither Trinity nor OmegaConf. What a key may hold is decided
by its type and, for words, by the `choices` in its metadata.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINES = ("auto", "local", "trinity")


def _one_of(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass
class RolloutSection:
    """How the workflow function is run."""

    run_timeout: float = 300.0
    """Seconds that one rollout may take; after that it counts as timed out."""
    max_failed_fraction: float = 1.0
    """Training stops when more than this share of a step's rollouts failed. 1: only if all did."""
    system_prompt: str | None = None
    """Handed to a workflow function that takes `system_prompt`. None: it gets none."""


@dataclass
class LocalSection:
    """The local engine: sampler and trainer on this machine."""

    dtype: str = _one_of("auto", "auto", "fp32", "float32", "bf16", "bfloat16")
    """Number format of sampler and trainer. auto: bf16 where the device computes in it."""
    device: str = _one_of("auto", "auto", "cpu", "cuda", "mps")
    """auto: CUDA, else Apple's MPS, else the CPU."""
    threads: int | None = None
    """Threads of each engine's arithmetic. None: PyTorch's choice."""
    max_batch: int = 64
    """Sequences that the sampler decodes at once."""
    micro_batch_tokens: int = 2048
    """Tokens that the trainer computes at once; bounds memory, never changes the result."""


@dataclass
class BudgetSection:
    """Limits, over all roles, processes and commands of a run, at which it saves and stops."""

    wall_seconds: float | None = None
    """Seconds from the start of the command. None: no limit, here and below."""
    usd: float | None = None
    """US dollars. Every model that is called needs a known price."""
    tokens: int | None = None
    """Prompt and completion tokens together."""
    calls: int | None = None
    """Calls of models; retries and answers from the cache are none."""


@dataclass
class CheckpointsSection:
    """Which checkpoints stay beside the newest `trainer.max_checkpoints_to_keep` (0: all)."""

    keep_best: int = 1
    """How many of those with the best held-out score (`report.score`) are not taken away."""


@dataclass
class PriceSettings:
    """What a model costs, in US dollars for a million tokens, or whose listed price it has."""

    input: float | None = None
    output: float | None = None
    cached_input: float | None = None
    """For prompt tokens that the vendor had cached. None: the same as `input`."""
    listed: str | None = None
    """In place of numbers: a model of the price list, such as gpt-4o-mini or azure/gpt-4o-mini."""


@dataclass
class ModelSettings:
    """One model behind an API. Keys are never written here, only the variables' names."""

    provider: str = _one_of("openai", "openai", "anthropic")
    """openai: any OpenAI-compatible endpoint."""
    model: str | None = None
    """The model's name at the provider. None in `models.policy`: the model being tuned."""
    base_url: str | None = None
    """Address of the API, such as http://127.0.0.1:8000/v1. None: the vendor's own."""
    api_key_env: str | None = None
    """The environment variable with the key. None: the vendor's, if `base_url` is the vendor's."""
    headers_env: dict[str, str] = field(default_factory=dict)
    """Extra HTTP headers: name of the header to name of the environment variable with it."""
    role: str | None = None
    """What its usage is counted under. None: the name it stands under in `models`."""
    temperature: float | None = None
    """None: the provider's default. So for the next two."""
    top_p: float | None = None
    max_tokens: int | None = None
    """Most tokens of an answer."""
    timeout: float = 120.0
    """Seconds of one attempt, from the connection to the last byte."""
    retries: int = 6
    """Attempts after the first one failed in a way that may pass."""
    backoff: float = 0.5
    """Seconds before the first retry; twice as long before each further one, at most 30."""
    max_concurrency: int = 32
    """Requests that are under way at once, in each process."""
    prices: PriceSettings | None = None
    """Wins over the price list. None: the list's for the address or, with a warning, the name."""


@dataclass
class AnsweringSection:
    """What operator graphs of either origin are told about their tasks."""

    benchmark: str | None = None
    """The benchmark of rows that name none: its question and, without a `judge`, its scoring."""
    score: str | None = None
    """Instead of a benchmark: `path/file.py:f` of row and answer; of written graphs 0 to 1."""
    problem: str | None = None
    """The field with the question. None: the benchmark's, or question, problem or prompt."""
    entry_point: str = "entry_point"
    """The field with the name of the function to write, for problems of code."""
    test_cases: str | None = None
    """Public tests for the operator Test, never those that answers are scored by: rows with
    entry_point and test, a list of asserts on `candidate`."""
    timeout: float = 180.0
    """Seconds that one rollout may run a graph, calls of models included."""
    models: dict[str, str] = field(default_factory=dict)
    """Which of `models` an operator or its instance uses, such as {Review: judge}. Others: the
    model being tuned, or the writer's executor."""


@dataclass
class GraphSection(AnsweringSection):
    """An operator graph in place of `workflow`: a folder with graph.py and its prompts."""

    path: str | None = None
    """The folder, relative to here or to the YAML: our own form or a `round_N` of AFlow."""
    trust: bool = False
    """True: graph.py runs in the run's own process, with your rights, instead of the sandbox."""
    max_calls: int = 100
    """Calls of operators and of the model that one rollout may make."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Prompts that win over the graph's files, by constant, operator's instance or operator."""


@dataclass
class WriterSection(AnsweringSection):
    """The policy writes a workflow for each problem; `executor` runs it, and turns this on."""

    executor: str | None = None
    """What the operators of a written graph call: a role of `models`, or an auxiliary model."""
    operators: list[str] = field(default_factory=list)
    """Operators that a graph may use. Empty: all, those under `operators` included."""
    problem_type: str | None = field(default=None, metadata={"choices": ("math", "code", "qa")})
    """Of rows that do not say it in a field `problem_type`. None: by their benchmark."""
    prompt: str | None = None
    """A file with the policy's own prompt, in place of the shipped template."""
    turns: int = 1
    """How often the policy may write: after the first time it sees what became of its graph."""
    max_calls: int = 20
    """Calls of models that a graph could make at worst; one that could make more is refused."""
    max_tokens: int | None = None
    """The same for prompt and completion tokens together. None: no limit."""
    max_usd: float | None = None
    """The same in US dollars, which needs known prices. None: no limit."""
    retries: int = 0
    """How often an operator of a written graph asks again for an answer that it cannot read."""


@dataclass
class HarvestSection:
    """Pairs of a problem and a graph that solves it, for the writer's supervised warm start."""

    sources: list[str] = field(default_factory=lambda: ["templates"])
    """Where graphs come from: templates, teacher, runs."""
    templates: str | None = None
    """A folder of templates of yours in place of the shipped ones: files of the hybrid form."""
    teacher: str | None = None
    """The role of `models` that is asked to write graphs, with the policy's own prompt."""
    teacher_tries: int = 1
    """How often the teacher is asked about each problem."""
    runs: list[str] = field(default_factory=list)
    """Run folders of the writer, whose best rollouts are tried again."""
    min_score: float = 1.0
    """A graph whose answer scores less is no example."""
    per_problem: int = 1
    """Most pairs of one problem, each of another structure."""
    per_structure: float | None = 0.5
    """Largest share of one structure among all pairs. None: no limit; the cheapest graph wins."""
    limit: int | None = None
    """So many problems, drawn by `seed`. None: all of the training task set."""


@dataclass
class RuntimeEnvSection:
    """What the workers of a cluster get beside the code that is found by tracing."""

    pip: list[str] = field(default_factory=list)
    """Requirements that Ray installs on every node, such as rapidfuzz==3.9.1."""
    secrets: list[str] = field(default_factory=list)
    """Further environment variables for workers, beside those of `models` and of your code."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Plain environment variables. Ray logs and shows them: never a place for keys."""
    include: list[str] = field(default_factory=list)
    """Files and folders that travel although no import and no path in the code names them."""
    exclude: list[str] = field(default_factory=list)
    """Files and folders that stay although their folder travels: data/raw, or *.ckpt."""
    trust_users: bool = False
    """Use a Ray that is there even if other users of its machines could change the run's code."""


@dataclass
class ReportSection:
    """What is counted as the held-out score, and what the report shows."""

    score: str = "reward"
    """'reward', or the name of a metric that the workflow records."""
    transcripts: int = 4
    """How many held-out items are shown with what was said before and after."""


@dataclass
class FivePartSection:
    """The five-part reward: five parts in [0, 1], their weights, and the scale of their sum."""

    correctness: float = 0.65
    efficiency: float = 0.15
    simplicity: float = 0.10
    format: float = 0.05
    repetition: float = 0.05
    """The five weights; together 1."""
    lowest: float = -10.0
    highest: float = 10.0
    """The weighted sum 0 becomes `lowest`, 1 becomes `highest`."""
    usd_limit: float = 0.01
    """Efficiency falls from 1 at no cost to 0 at this cost of a rollout, in US dollars."""
    token_limit: int = 8192
    """The same in tokens, for rollouts with a call whose price is not known."""
    seconds_limit: float = 60.0
    operator_limit: int = 10
    """Each half of simplicity falls to 0 at so much time, and so many operator calls."""


@dataclass
class AgentRewardSection:
    """The reward of tool-using agents: weighted parts in [0, 1], less penalties."""

    completion: float = 0.40
    accuracy: float = 0.25
    efficiency: float = 0.15
    timing: float = 0.10
    format: float = 0.10
    """The five weights; together 1."""
    wrong_tool: float = 0.3
    redundant_call: float = 0.2
    format_error: float = 0.1
    time_out: float = 0.5
    """What is taken off for each occurrence."""
    lowest: float = -1.0
    """No reward is below this, however many penalties there are."""
    optimal_steps: int = 5
    """Steps that cost no efficiency, for rows without `optimal_steps` of their own."""


@dataclass
class RewardsSection:
    """Settings of the rewards that come with the package, in `rewards/`."""

    benchmark: str | None = None
    """Of rows that name none: gsm8k, math, humaneval, mbpp, hotpotqa, drop, reasoning_gym:TASK."""
    five_part: FivePartSection = field(default_factory=FivePartSection)
    agent: AgentRewardSection = field(default_factory=AgentRewardSection)


@dataclass
class MixSource:
    """One source of a mix: a training task set, by its name, or the rows that name it `source`."""

    ratio: float | None = None
    """Share of every training batch; together 1. None for all: math 0.4, code 0.3, qa 0.3."""
    benchmark: str | None = None
    """Put into the rows as `benchmark`. None: what the rows say."""


@dataclass
class AflowSections:
    """The keys that stand beside Trinity's at the top level."""

    workflow: str | None = None
    """The function to tune: `path/file.py:function` or `module:function`."""
    judge: str | None = None
    """A function that scores what the workflow returned, in the same form. None: no judge."""
    graph: GraphSection = field(default_factory=GraphSection)
    writer: WriterSection = field(default_factory=WriterSection)
    harvest: HarvestSection = field(default_factory=HarvestSection)
    operators: dict[str, str] = field(default_factory=dict)
    """Operators of yours that the graph may name: `Name: path/file.py:Name`."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """Prompts by operator or `Operator.instance`: a text, or texts by name. A graph's own win."""
    engine: str = _one_of("auto", *ENGINES)
    """auto: Trinity's vLLM and verl where they can run, else the local engine."""
    inline: bool = False
    """True: the whole run in one process, without Ray."""
    deterministic: bool = False
    """True: fp32 and batch-invariant sampling, so that Ray and inline give equal tokens."""
    seed: int = 0
    """Seeds sampling, initial adapters and whatever else is drawn."""
    physical_gpus: Any = None
    """GPUs that the run claims and sees: auto (free ones, as many as it needs), or a list of
    numbers, UUIDs or GPU:INSTANCE. None: `CUDA_VISIBLE_DEVICES` counts."""
    protected_pids: list[int] = field(default_factory=list)
    """Processes that `aflow-tune gpus free` never ends while the run holds claimed GPUs."""
    sandbox: Any = "auto"
    """What programs written by a model run in: auto (the strongest that works here), bubblewrap,
    landlock, or unsafe_subprocess (no isolation, with your rights). With packages to import:
    `{policy: auto, packages: [numpy]}`, kept as `auto+numpy`."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    local: LocalSection = field(default_factory=LocalSection)
    budget: BudgetSection = field(default_factory=BudgetSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    models: dict[str, ModelSettings] = field(default_factory=dict)
    """Models beside the tuned one, by role; the entry `policy` gives the tuned model's price."""
    runtime_env: RuntimeEnvSection = field(default_factory=RuntimeEnvSection)
    report: ReportSection = field(default_factory=ReportSection)
    rewards: RewardsSection = field(default_factory=RewardsSection)
    mix: dict[str, MixSource] = field(default_factory=dict)
    """Shares of every training batch by source. Empty: Trinity's order of its task sets."""
    quick_eval: int | None = None
    """Held-out rows, a fixed sample, of the evaluations between first and last. None: all."""


@dataclass
class KeyPositions:
    """Where each key was written. Key paths are canonical, list items by number (`a.b.0.c`)."""

    file: str | None = None
    """The YAML as the user named it; None where there is none."""
    base: Path | None = None
    """Where relative paths are looked for after the current folder: that of the YAML."""
    lines: dict[str, int] = field(default_factory=dict)
    """Line of the file, counted from 1; this and the next three by key path."""
    overrides: dict[str, str] = field(default_factory=dict)
    """`key=value` of the command line."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Argument of `tune()`."""
    raw: dict[str, str] = field(default_factory=dict)
    """Text of a value that holds an interpolation."""
    stage: str = ""
    """`stages.1` for the keys of one stage, as its own configuration has them."""
    stage_sections: tuple[str, ...] = ()
    """What a stage may hold."""
    shown: dict[str, str] = field(default_factory=dict)
    """Of keys that the stage itself wrote, how they are called in the file."""

    def given(self, key: str) -> bool:
        """Whether the user set this key, or anything below it."""
        places = (*self.lines, *self.overrides, *self.arguments)
        return any(path == key or path.startswith(key + ".") for path in places)

    def beside(self, name: str) -> Path:
        """A path of the configuration: relative to the current folder, or else to `base`."""
        path = Path(name).expanduser()
        return self.base / path if self.base is not None and not path.exists() else path

    def inherited(self, key: str) -> bool:
        """Whether the user set this key at the top level, for all stages."""
        return bool(self.stage) and self.given(key) and key not in self.shown

    def where(self, key: str) -> str:
        """`file:line: key`, or the argument that set it, or the key alone."""
        path = key
        while path:
            name = display(self.shown.get(path, path) + key[len(path) :])
            if path in self.arguments:
                return f"{self.arguments[path]}: {name}"
            if path in self.overrides:
                return f"command line: {self.overrides[path]}"
            if path in self.lines:
                return f"{self.file}:{self.lines[path]}: {name}"
            path = path.rpartition(".")[0]
        of_stage = key.partition(".")[0] in self.stage_sections
        name = display(f"{self.stage}.{key}" if of_stage else key)
        line = f":{self.lines[self.stage]}" if of_stage and self.stage in self.lines else ""
        return f"{self.file}{line}: {name}" if self.file else name


def canonical(key: str) -> str:
    """`a.b[0].c` and `a.b.0.c` as `a.b.0.c`."""
    return re.sub(r"\[(\d+)\]", r".\1", key)


def display(key: str) -> str:
    """`a.b.0.c` as `a.b[0].c`, the form that people read."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)
