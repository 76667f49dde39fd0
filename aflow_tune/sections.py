"""Our sections of the configuration, beside Trinity's own, and where each key was written.

Plain dataclasses: this module imports neither Trinity nor OmegaConf. The type of a field, and the
`choices` in its metadata if any, determine which values the YAML may give it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINES = ("auto", "local", "trinity")
PROPOSERS = ("edits", "policy", "teacher")


def _one_of(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass
class RolloutSection:
    """How rollouts of the workflow function are made."""

    run_timeout: float = 300.0
    """Seconds that one rollout may take; then it fails as timed out."""
    max_failed_fraction: float = 1.0
    """Training stops if more than this fraction of a step's rollouts fail. 1: only if all do."""
    system_prompt: str | None = None
    """Passed to a workflow function that takes `system_prompt`. None: none is passed."""


@dataclass
class LocalSection:
    """The local engine: sampler and trainer on this machine."""

    dtype: str = _one_of("auto", "auto", "fp32", "float32", "bf16", "bfloat16")
    """Number format of sampler and trainer. auto: bf16 if the device supports it natively."""
    device: str = _one_of("auto", "auto", "cpu", "cuda", "mps")
    """auto: CUDA, else Apple's MPS, else the CPU."""
    load_in: str | None = field(default=None, metadata={"choices": ("4bit", "8bit")})
    """The frozen base of the policy in NF4 or int8, by bitsandbytes; needs an adapter. None: no."""
    threads: int | None = None
    """CPU threads. None: the physical cores, PyTorch's choice in a process without a sampler."""
    max_batch: int = 64
    """Most sequences that the sampler decodes at once."""
    micro_batch_tokens: int = 2048
    """Most tokens in one micro-batch of the trainer; bounds memory, never changes the result."""


@dataclass
class BudgetSection:
    """Limits at which a run saves and stops, summed over its roles, processes and commands."""

    wall_seconds: float | None = None
    """Seconds since this command started, not summed. None: no limit, here and below."""
    usd: float | None = None
    """US dollars. Every model that is called must have a known price."""
    tokens: int | None = None
    """Prompt and completion tokens together."""
    calls: int | None = None
    """Model calls; retries and answers from the cache do not count."""


@dataclass
class CheckpointsSection:
    """Which checkpoints to keep beside the newest `trainer.max_checkpoints_to_keep` (0: all)."""

    keep_best: int = 1
    """How many checkpoints with the best held-out score (`report.score`) to keep."""


@dataclass
class PriceSettings:
    """Prices of a model in US dollars per million tokens, or the model whose price it has."""

    input: float | None = None
    output: float | None = None
    cached_input: float | None = None
    """For prompt tokens in the vendor's cache. None: the same as `input`."""
    listed: str | None = None
    """Instead of numbers: a model of the price list, such as gpt-4o-mini or azure/gpt-4o-mini."""


@dataclass
class ModelSettings:
    """One model behind an API. Keys are never written here, only names of their variables."""

    provider: str = _one_of("openai", "openai", "anthropic")
    """openai: any OpenAI-compatible endpoint."""
    model: str | None = None
    """The model's name at the provider. None in `models.policy`: the model being tuned."""
    base_url: str | None = None
    """Address of the API, such as http://127.0.0.1:8000/v1. None: the vendor's own."""
    api_key_env: str | None = None
    """The environment variable with the key. None: the vendor's, for the vendor's address only."""
    headers_env: dict[str, str] = field(default_factory=dict)
    """Extra HTTP headers: header name to the environment variable with its value."""
    role: str | None = None
    """The role that its usage is counted under. None: its name in `models`."""
    temperature: float | None = None
    """None: the provider's default, here and in the next two."""
    top_p: float | None = None
    max_tokens: int | None = None
    """Most tokens of a response."""
    timeout: float = 120.0
    """Seconds of one attempt, from the connection to the last byte."""
    retries: int = 6
    """Further attempts after an error that may be temporary."""
    backoff: float = 0.5
    """Seconds before the first retry; doubled for each further one, at most 30."""
    max_concurrency: int = 32
    """Most concurrent requests of each process."""
    prices: PriceSettings | None = None
    """Wins over the price list. None: listed by address or, with a warning, by model name."""


@dataclass
class AnsweringSection:
    """Settings shared by `graph` and `writer`: which fields of a row they use, and scoring."""

    benchmark: str | None = None
    """Benchmark of rows that name none: decides the question and, without `judge`, the score."""
    score: str | None = None
    """Instead of a benchmark: `path/file.py:f` of row and answer; for the writer in [0, 1]."""
    problem: str | None = None
    """The field with the question. None: the benchmark's, or question, problem or prompt."""
    entry_point: str = "entry_point"
    """The field with the name of the function to write, for code problems."""
    test_cases: str | None = None
    """File of public tests for the operator Test, never those that score answers: rows with
    entry_point and test, a list of asserts on `candidate`."""
    timeout: float = 180.0
    """Seconds that one execution of a graph may take, model calls included."""
    models: dict[str, str] = field(default_factory=dict)
    """Which of `models` an operator or its instance calls, such as {Review: judge}. Others call
    the model being tuned, or the writer's executor."""


@dataclass
class GraphSection(AnsweringSection):
    """An operator graph in place of `workflow`: a folder with graph.py and its prompts."""

    path: str | None = None
    """The folder, relative to the current one or the YAML's: our form, or AFlow's `round_N`."""
    trust: bool = False
    """True: graph.py runs in the run's own process, with your permissions, not in the sandbox."""
    max_calls: int = 100
    """Most operator and model calls of one rollout."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Prompts that win over the graph's files, by constant, operator instance or operator."""


@dataclass
class WriterSection(AnsweringSection):
    """The policy writes a workflow for each problem. Setting `executor` turns this on."""

    executor: str | None = None
    """The model that operators of a written graph call: of `models`, or an auxiliary model."""
    operators: list[str] = field(default_factory=list)
    """Operators that a graph may use. Empty: all, those under `operators` included."""
    problem_type: str | None = field(default=None, metadata={"choices": ("math", "code", "qa")})
    """Type of rows without a field `problem_type`. None: by their benchmark."""
    prompt: str | None = None
    """A file with the policy's prompt, instead of the shipped template."""
    turns: int = 1
    """How many graphs the policy may write; it sees the outcome of each before the next."""
    max_calls: int = 20
    """A graph that could make more model calls than this in the worst case is refused."""
    max_tokens: int | None = None
    """The same for prompt and completion tokens together. None: no limit."""
    max_usd: float | None = None
    """The same in US dollars, which needs known prices. None: no limit."""
    retries: int = 0
    """How often an operator of a written graph asks again after an unreadable answer."""


@dataclass
class DialoguesSection:
    """Data sets of dialogues with tools, for `mode: train` and as task sets."""

    as_tasks: bool = False
    """Task sets are dialogues of any known form, of which each turn of the assistant is a task.
    Without `workflow`, `graph` and `writer` it is answered with the row's tools and scored."""
    catalogue: str | None = None
    """A file of tools, for rows that only name them (SAGE, Seal-Tools). None: rows bring theirs."""
    candidates: int = 4
    """Tools offered with a row of Seal-Tools, those that it calls among them."""
    task_weights: dict[str, float] = field(default_factory=dict)
    """Share of each training batch by type of task: selection, planning, timing, retrieval.
    Together 1. Empty: the rows in their order."""


@dataclass
class HarvestSection:
    """Collects pairs of problem and solving graph for supervised warm start of the writer."""

    sources: list[str] = field(default_factory=lambda: ["templates"])
    """Sources of graphs, any of: templates, teacher, runs."""
    templates: str | None = None
    """A folder of templates in the hybrid form, instead of the shipped ones."""
    teacher: str | None = None
    """The role of `models` that writes graphs from the policy's prompt."""
    teacher_tries: int = 1
    """How many graphs the teacher writes for each problem."""
    runs: list[str] = field(default_factory=list)
    """Run folders of the writer; the graphs of their best rollouts are executed again."""
    min_score: float = 1.0
    """Least score of the answer for a graph to be kept."""
    per_problem: int = 1
    """Most pairs of one problem, all of different structures."""
    per_structure: float | None = 0.5
    """Largest share of one structure, at least an equal one. None: the cheapest graph wins."""
    limit: int | None = None
    """How many problems to draw by `seed`. None: all of the training task sets."""


@dataclass
class CoresetSection:
    """`mode: train` on part of its data set, which is chosen once, before the first step."""

    size: float | None = None
    """How many rows: a share of them (below 1) or a count. None: all rows, nothing is chosen."""
    strategy: str = _one_of("hybrid", "hybrid", "loss_topk", "diversity", "random")
    """loss_topk: the rows with the highest mean loss per learned token. diversity: k-centre greedy
    on the policy's mean hidden states. hybrid: half by loss, then centres beside these."""
    seed: int | None = None
    """Decides `random`, and the row that `diversity` begins with. None: the run's `seed`."""


@dataclass
class ReplaySection:
    """Rehearsal of earlier rounds: `mode: train` learns again from rows of finished runs."""

    buffer: str | None = None
    """The file (.jsonl) of their rows, which runs share. None: no rehearsal. A run's own rows join
    it when the run has reached its target."""
    ratio: float = 0.1
    """The share of old rows in what is learned, exact over the batches. 0: only join."""
    rounds: list[str] = field(default_factory=list)
    """In a YAML `from`: the rounds to rehearse, names of runs. Empty: all of them."""
    capacity: int | None = None
    """Most rows in the buffer, in even parts for its rounds. None: no limit."""


@dataclass
class SearchTaskset:
    """One of several task sets of a search; what is None is as in `graph`."""

    path: str | None = None
    """The folder of its seed graph."""
    benchmark: str | None = None
    score: str | None = None
    problem: str | None = None
    """The field with the question."""
    held_out: str | None = None
    """The held-out task set that the winner is compared on. None: all of them."""


@dataclass
class SearchSection:
    """A search for a workflow that is better than the one under `graph`."""

    executor: str | None = None
    """The frozen model that graphs call: of `models`, or an auxiliary model. None: the model under
    `model` as it is, answering greedily."""
    propose: list[str] = field(default_factory=lambda: ["edits"])
    """Who proposes changes, any of: edits (of the graph, without a model), policy (the model under
    `model`, which learns from what its proposals were worth), teacher."""
    teacher: str | None = None
    """The role of `models` that proposes changes as the teacher."""
    select: str = _one_of("puct", "puct", "aflow", "random")
    """How the next workflow to change is chosen. aflow: by AFlow's rule."""
    operators: list[str] = field(default_factory=list)
    """Operators that a workflow may use. Empty: all, those under `operators` included."""
    instructions: dict[str, str] = field(default_factory=dict)
    """Further instructions that an operator may be given, by a name for each."""
    rounds: int | None = None
    """Rounds of each task set. None: no limit, here and in the next three."""
    rollouts: int | None = 600
    """Executions of workflows on training problems, of all task sets together."""
    tokens: int | None = None
    """Prompt and completion tokens of these and of the proposers."""
    usd: float | None = None
    """Their US dollars. Every model that is called must have a known price."""
    patience: int | None = 20
    """The search ends when its three best workflows have not improved in so many rounds."""
    problems: int = 24
    """Training problems that each child is raced on against its parent."""
    final_problems: int = 36
    """Further training problems that the three best workflows are run on at the end."""
    children: int = 4
    """Proposals of a round, which are raced together."""
    race: bool = True
    """False: each child is run on all problems, as in AFlow."""
    train_every: int = 2
    """Rounds between two training steps of the policy. 0: it proposes, but does not learn."""
    pool: str | None = None
    """The file of the experience pool, which searches may share. None: in the search's folder."""
    tasksets: dict[str, SearchTaskset] = field(default_factory=dict)
    """By name of a training task set: search for a workflow for each, in parallel. Empty: one
    workflow for all training problems."""


@dataclass
class RuntimeEnvSection:
    """What the workers of a cluster get beside the code that is found by following imports."""

    pip: list[str] = field(default_factory=list)
    """Requirements that Ray installs for the run, such as rapidfuzz==3.9.1."""
    secrets: list[str] = field(default_factory=list)
    """More secret environment variables, beside those named in `models` and in your code."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Plain environment variables. Ray logs and shows them: put no keys here."""
    include: list[str] = field(default_factory=list)
    """Files and folders to send although the code does not import them."""
    exclude: list[str] = field(default_factory=list)
    """Files and folders not to send although their folder is sent: data/raw, or *.ckpt."""
    trust_users: bool = False
    """Join a running Ray even if other users of its machines could change the run's code."""


@dataclass
class ReportSection:
    """Which number is the held-out score, and what the report shows."""

    score: str = "reward"
    """`reward`, or the name of a metric that the workflow records."""
    transcripts: int = 4
    """How many held-out items are shown with transcripts from before and after training."""


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
    """The reward is scaled linearly: `lowest` for a weighted sum of 0, `highest` for 1."""
    usd_limit: float = 0.01
    """Efficiency falls from 1 at no cost to 0 at this cost of a rollout in US dollars."""
    token_limit: int = 8192
    """The same in tokens, for rollouts with a call of unknown price."""
    seconds_limit: float = 60.0
    operator_limit: int = 10
    """The two halves of simplicity fall to 0 at this time and this many operator calls."""


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
    """Penalty subtracted for each occurrence."""
    lowest: float = -1.0
    """Lower bound of the reward."""
    optimal_steps: int = 5
    """Steps up to which efficiency is 1, for rows without a field `optimal_steps`."""


@dataclass
class TurnRewardSection:
    """The reward of one turn of an agent: weights of the measures, each in [0, 1], that compare its
    tool calls with the gold ones. The weight of one that does not apply is spread over the others.
    """

    end_to_end_success: float = 0.40
    """The turn is right as a whole."""
    tool_selection_accuracy: float = 0.20
    """The names of its calls."""
    argument_correctness: float = 0.20
    """Their arguments."""
    timing_precision: float = 0.10
    """Whether it calls at all."""
    plan_success_rate: float = 0.05
    """The order of its calls, for tasks with a plan."""
    step_efficiency: float = 0.05
    """No more calls than needed. The six weights are 1 together."""


@dataclass
class RewardsSection:
    """Settings of the rewards that come with the package, in `rewards/`."""

    benchmark: str | None = None
    """For rows that name none: gsm8k, math, humaneval, mbpp, hotpotqa, drop, reasoning_gym:TASK."""
    five_part: FivePartSection = field(default_factory=FivePartSection)
    agent: AgentRewardSection = field(default_factory=AgentRewardSection)
    turns: TurnRewardSection = field(default_factory=TurnRewardSection)


@dataclass
class MixSource:
    """One source of a mix: the training task set of that name, or the rows with that `source`."""

    ratio: float | None = None
    """Share of each training batch; they sum to 1. None for all: math 0.4, code 0.3, qa 0.3."""
    benchmark: str | None = None
    """Written into the rows as `benchmark`. None: as the rows say."""


@dataclass
class AflowSections:
    """Our keys at the top level, beside Trinity's."""

    workflow: str | None = None
    """The function to tune: `path/file.py:function` or `module:function`."""
    judge: str | None = None
    """The function that scores the workflow's response, in the same form. None: no judge."""
    graph: GraphSection = field(default_factory=GraphSection)
    writer: WriterSection = field(default_factory=WriterSection)
    harvest: HarvestSection = field(default_factory=HarvestSection)
    search: SearchSection = field(default_factory=SearchSection)
    operators: dict[str, str] = field(default_factory=dict)
    """Your operators that a graph may use: `Name: path/file.py:Name`."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """Prompts by operator or `Operator.instance`: a text, or texts by name. A graph's own win."""
    engine: str = _one_of("auto", *ENGINES)
    """auto: Trinity's vLLM and verl if they can run here, else the local engine."""
    inline: bool = False
    """True: the whole run in one process, without Ray."""
    deterministic: bool = False
    """True: fp32 and batch-invariant sampling, so that runs with and without Ray are equal."""
    seed: int = 0
    """Seeds sampling, initial adapters and every other random choice."""
    physical_gpus: Any = None
    """GPUs that the run claims and sees: auto (as many free ones as it needs), or a list of
    numbers, UUIDs or GPU:INSTANCE. None: those of `CUDA_VISIBLE_DEVICES`, none claimed."""
    protected_pids: list[int] = field(default_factory=list)
    """Processes that `aflow-tune gpus free` never ends while the run holds claimed GPUs."""
    sandbox: Any = "auto"
    """Sandbox of model-written programs: auto (the strongest that works here), bubblewrap,
    landlock, or unsafe_subprocess (no isolation, with your permissions). With packages to import:
    `{policy: auto, packages: [numpy]}`, stored as `auto+numpy`."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    local: LocalSection = field(default_factory=LocalSection)
    budget: BudgetSection = field(default_factory=BudgetSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    models: dict[str, ModelSettings] = field(default_factory=dict)
    """Models beside the tuned one, by role. The entry `policy` sets the tuned model's price."""
    runtime_env: RuntimeEnvSection = field(default_factory=RuntimeEnvSection)
    report: ReportSection = field(default_factory=ReportSection)
    rewards: RewardsSection = field(default_factory=RewardsSection)
    dialogues: DialoguesSection = field(default_factory=DialoguesSection)
    coreset: CoresetSection = field(default_factory=CoresetSection)
    replay: ReplaySection = field(default_factory=ReplaySection)
    mix: dict[str, MixSource] = field(default_factory=dict)
    """Shares of each training batch by source. Empty: Trinity's order of the task sets."""
    quick_eval: int | None = None
    """Rows of the fixed sample for evaluations between the first and the last. None: all rows."""


@dataclass
class KeyPositions:
    """Where each key was written. Key paths are canonical: list items by number (`a.b.0.c`)."""

    file: str | None = None
    """The path of the YAML as given; None if there is none."""
    base: Path | None = None
    """The folder of the YAML, in which relative paths are looked up after the current folder."""
    lines: dict[str, int] = field(default_factory=dict)
    """Line in the file, from 1; this and the next three mappings are by key path."""
    overrides: dict[str, str] = field(default_factory=dict)
    """The `key=value` of the command line that set it."""
    arguments: dict[str, str] = field(default_factory=dict)
    """The argument of `tune()` that set it."""
    raw: dict[str, str] = field(default_factory=dict)
    """The text of a value with an interpolation."""
    stage: str = ""
    """The path of the stage (`stages.1`) whose configuration this describes; else empty."""
    stage_sections: tuple[str, ...] = ()
    """The sections that a stage may have."""
    shown: dict[str, str] = field(default_factory=dict)
    """Key paths in the file of the keys that the stage itself sets."""

    def given(self, key: str) -> bool:
        """Whether the user set this key, or anything below it."""
        places = (*self.lines, *self.overrides, *self.arguments)
        return any(path == key or path.startswith(key + ".") for path in places)

    def beside(self, name: str) -> Path:
        """A path of the configuration: relative to the current folder if it exists, else `base`."""
        path = Path(name).expanduser()
        return self.base / path if self.base is not None and not path.exists() else path

    def inherited(self, key: str) -> bool:
        """Whether this is a stage that inherits the key from the top level."""
        return bool(self.stage) and self.given(key) and key not in self.shown

    def where(self, key: str) -> str:
        """The place of a key for messages: `file:line: key`, what set it, or the key alone."""
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
    """The canonical form of a key path: `a.b[0].c` becomes `a.b.0.c`."""
    return re.sub(r"\[(\d+)\]", r".\1", key)


def display(key: str) -> str:
    """The displayed form of a key path: `a.b.0.c` becomes `a.b[0].c`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)
