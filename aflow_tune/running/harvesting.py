"""Runs a harvest (`mode: harvest`, `aflow-tune harvest`) and writes its files.

    <folder>/
      sft.jsonl             the pairs: `messages` and their origin, for SFT in `mode: train`
      harvest.json          counts of all candidates by outcome
      trials/ID.jsonl       executed candidates; ID is a hash of the settings that decide outcomes
      lessons/ID.jsonl      answers of one teacher; ID is a hash of its settings

The first two are written atomically at the end; the others grow, and the same command resumes from
them. Training problems that are also held out are dropped before any model call. What to try and
what to keep is decided in `aflow_tune.harvest`.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.common.config import DataSelectorConfig, TasksetConfig

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.file_rules import run_folders, templates_of
from aflow_tune.config.tasksets import benchmarks_of
from aflow_tune.data.leaks import find_leaks
from aflow_tune.data.rows import with_source
from aflow_tune.engines.local.models import pick_device
from aflow_tune.engines.trinity.readers import read_all
from aflow_tune.errors import RunFailed
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.files import as_line, write_json, write_whole
from aflow_tune.harvest.candidates import Candidate, Problem, past_candidates, template_candidates
from aflow_tune.harvest.harvest import Harvest, Journal, Lesson, Trial
from aflow_tune.models.clients import client_for
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.report.html import COUNTS_FILE
from aflow_tune.running.stopping import run_within_limits
from aflow_tune.sandbox import use_policy

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.writer.workflow import WriterWorkflow

PAIRS_FILE = "sft.jsonl"
AT_ONCE_ON_PROCESSOR = 16  # without a GPU: more concurrent graphs would only time out
_OUTCOMES = ("untried", "refused", "failed", "wrong", "unscored")


@dataclass(frozen=True)
class HarvestSummary:
    """The file of the pairs, and the content of `harvest.json`."""

    pairs: Path
    counts: Mapping[str, Any]


def run_harvest(
    config: AflowConfig,
    folder: Path,
    stop: Callable[[], bool],
    phase: Callable[[str], None],
    workflow: WriterWorkflow,
    *,
    out: Path | None = None,
) -> HarvestSummary:
    """Harvest with a prepared configuration and materialised task sets, in a `folder` that the
    caller has locked; the pairs go to `out`, by default `sft.jsonl` in it. Raises BadInput: rows,
    templates or models cannot be used; Interrupted, BudgetReached: stopped, the same call resumes;
    RunFailed: no pair was found, or a file cannot be written."""
    pairs = out or folder / PAIRS_FILE
    work = _harvest(config, folder, phase, workflow)
    try:
        rows, counts = run_within_limits(
            config, work, stop, phase, "what was tried is kept", folder
        )
        write_json(folder / COUNTS_FILE, counts)
        if rows:
            write_whole(pairs, b"".join(map(as_line, rows)))
    except OSError as error:
        raise RunFailed(f"the harvest cannot be written to {folder}: {error}") from error
    if not rows:
        raise RunFailed(f"nothing was harvested: {_why_nothing(counts)}")
    return HarvestSummary(pairs, counts)


def _why_nothing(counts: Mapping[str, Any]) -> str:
    if not counts["problems"]:
        return f"no problem is left: {counts['leaks']} stand in a held-out task set too"
    shown = ", ".join(f"{counts[name]} {name}" for name in _OUTCOMES if counts[name])
    if not shown:
        return "there was no graph to try. Add a source to harvest.sources."
    examples = [*counts["untried_by_reason"], *counts["failed_examples"]][:1]
    return "\n".join([f"no graph solved a problem ({shown})", *examples, f"see {COUNTS_FILE}"])


async def _harvest(
    config: AflowConfig, folder: Path, phase: Callable[[str], None], workflow: WriterWorkflow
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of `sft.jsonl`, and the counts of `harvest.json`."""
    phase("reading the problems")
    section, spend = config.harvest, spend_of(config)
    problems, leaks = await _problems(config, workflow)
    if leaks:
        phase(f"{leaks} problems are held out too, exactly or nearly: dropped")
    templates = templates_of(config) if "templates" in section.sources else []
    folders = run_folders(config) if "runs" in section.sources else []
    past, strangers = past_candidates(folders, problems, section.min_score)

    def candidates(problem: Problem) -> list[Candidate]:
        own = template_candidates(problem, templates, workflow.operators)
        return [*own, *past.get(problem.key, [])]

    roles = {workflow.executor, *workflow.models.values()}
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        phase(f"harvesting: {done} of {len(problems)} problems")

    spend.start()
    with use_policy(config.sandbox), use_prompts(config.prompts), spend.open():
        async with LocalModels() as local, AsyncExitStack() as stack:
            trials, lessons = _journals(config, folder, workflow, roles)
            auxiliary: dict[str, Any] = {}
            at_once = config.local.max_batch
            if problems and roles & {model.name for model in config.explorer.auxiliary_models}:
                phase("loading the executor")
                auxiliary = await stack.enter_async_context(local.auxiliary_chat_models(config))
                if pick_device(config.local.device).type != "cuda":
                    at_once = min(at_once, AT_ONCE_ON_PROCESSOR)
            harvest = Harvest(
                workflow,
                problems,
                candidates,
                section,
                trials,
                lessons,
                auxiliary=auxiliary,
                rewards=config.rewards,
                teacher=client_for(str(section.teacher)) if "teacher" in section.sources else None,
                seconds=config.rollout.run_timeout,
                seed=config.seed,
                at_once=at_once,
            )
            await harvest.run(advance)
            rows, counts = harvest.result()
    return rows, counts | {"leaks": leaks, "rollouts_of_other_problems": strangers}


async def _problems(config: AflowConfig, workflow: WriterWorkflow) -> tuple[list[Problem], int]:
    """The problems, and how many rows were dropped because they are also held out."""
    rows = await _rows(config)
    held_out = [
        dict(task.raw_task or {})
        for taskset in config.buffer.explorer_input.eval_tasksets
        for task in await read_all(replace(taskset, data_selector=DataSelectorConfig()))
    ]
    # Arguments swapped on purpose: finds the training rows that occur among the held-out ones.
    leaking = {leak.held_out for leak in await asyncio.to_thread(find_leaks, held_out, rows)}
    found: dict[str, Problem] = {}
    for number, row in enumerate(rows):
        if number not in leaking:
            key, name = digest(row), row.get(workflow.entry_point)
            found[key] = Problem(
                key,
                text=workflow.problem_of(row),
                problem_type=workflow.type_of(row),
                row=row,
                entry_point=name if isinstance(name, str) else None,
            )
    problems, limit = list(found.values()), config.harvest.limit
    if limit is not None and limit < len(problems):
        drawn = random.Random(config.seed).sample(range(len(problems)), limit)
        problems = [problems[number] for number in sorted(drawn)]
    return problems, len(leaking)


async def read_rows(taskset: TasksetConfig) -> list[dict[str, Any]]:
    """Every row of a task set, once and in its order."""
    plain = DataSelectorConfig()
    once: Any = {"is_eval": True, "index": 0, "total_epochs": 1, "total_steps": None}
    whole = replace(taskset, data_selector=plain, task_selector=plain, **once)
    return [dict(task.raw_task or {}) for task in await read_all(whole)]


async def _rows(config: AflowConfig) -> list[dict[str, Any]]:
    """The rows of the training task sets, each once, with the source columns that a mix adds."""
    inputs, benchmarks = config.buffer.explorer_input, benchmarks_of(config)
    rows = []
    for taskset in [*([inputs.taskset] if inputs.taskset else []), *inputs.tasksets]:
        for row in await read_rows(taskset):
            if config.mix:
                source = taskset.name if taskset.name in config.mix else str(row.get("source"))
                row = with_source(row, source, benchmarks.get(source))
            rows.append(row)
    return rows


def _journals(
    config: AflowConfig, folder: Path, workflow: WriterWorkflow, roles: set[str]
) -> tuple[Journal, Journal]:
    """The journals of trials with exactly these settings, and of this teacher's answers."""
    decides = {
        "writer": asdict(config.writer),
        "models": {role: asdict(config.models[role]) for role in sorted(roles & {*config.models})},
        "auxiliary": {
            str(model.name): [model.model_path, model.temperature, model.top_p, model.top_k]
            for model in config.explorer.auxiliary_models
        },
        "rewards": asdict(config.rewards),
        "prompts": config.prompts,
        "code": [source_of(item) for item in workflow.carries],
        "sandbox": config.sandbox,
    }
    asks = "teacher" in config.harvest.sources
    teacher = asdict(config.models[str(config.harvest.teacher)]) if asks else None
    trials = Journal(folder / "trials" / f"{digest(decides)}.jsonl", Trial)
    return trials, Journal(folder / "lessons" / f"{digest(teacher)}.jsonl", Lesson)


def digest(value: Any) -> str:
    """A short hash of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_of(item: Callable[..., Any]) -> str:
    """The item's name, and the source of its module if available."""
    home = getattr(item, "__module__", "")
    name, module = f"{home}.{getattr(item, '__qualname__', item)}", sys.modules.get(home or "")
    try:
        return name + inspect.getsource(module or item)
    except (OSError, TypeError):
        return name
