"""Solves problems with a trained policy: it writes a workflow, which the executor runs.

    async with open_trained(Path("runs/my_project/my_run")) as inferer:
        solved = await inferer.solve(Problem("What is 17 * 23?", "math"))

The run's own `writer:` settings apply, so the policy is prompted, checked, run and rewarded as in
training, fallbacks included. The run's budget is not charged: `writer.max_calls`, `max_tokens` and
`max_usd` bound the cost of one problem. Problems may be solved concurrently.
`evaluation/trained.py` defines which weights a folder means.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aflow_tune.config.accounting import say_prices
from aflow_tune.config.load import load_config
from aflow_tune.config.validate import check_run_prompts, resolve_functions
from aflow_tune.context import RolloutContext
from aflow_tune.engines.local.checkpoint import fingerprint
from aflow_tune.engines.trinity.rollout.endpoint import base_url, check_endpoint
from aflow_tune.engines.trinity.rollout.recording import (
    RecordingClient,
    RolloutRecorder,
    recording_client,
)
from aflow_tune.errors import AflowTuneError, BadInput, Fault
from aflow_tune.evaluation.evaluating import LocalModels, endpoint_model
from aflow_tune.evaluation.trained import config_source, find_weights, make_ready
from aflow_tune.files import append_line, as_line, drop_torn_line, write_whole
from aflow_tune.models.clients import RunSpend
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.scoring import score_answer
from aflow_tune.scoring.numbers import last_number
from aflow_tune.scoring.rewards import Unscored, scored
from aflow_tune.sections import BudgetSection
from aflow_tune.trace import Trace
from aflow_tune.using.solved import Problem, Solved, solved
from aflow_tune.writer.results import raise_if_models_failed
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK, WriterRun, WriterWorkflow

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig


def open_trained(
    checkpoint: Path | None,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    endpoint: str | None = None,
    served_model: str | None = None,
    key_variable: str | None = None,
    temperature: float | None = None,
) -> Inferer:
    """The policy of a checkpoint, a configuration or an endpoint, checked and not yet loaded.

    Args:
        checkpoint: see `trained.find_weights`. None: the base model of `config`, or the one at
            the endpoint.
        config: the YAML. None: that of the run to which the checkpoint belongs.
        endpoint: base URL of an OpenAI-compatible API that serves the policy as `served_model`.
        temperature: of the policy. None: that of the held-out tasks.

    Raises:
        BadInput: there are no weights, or the configuration does not fit (no writer, faults).
    """
    found = None
    if checkpoint is not None and (endpoint is None or config is None):
        found = find_weights(checkpoint)
    file = config_source(found, config)
    weights = found.weights if found is not None and endpoint is None else None
    ready = load_config(file, overrides)
    if not ready.writer.executor:
        raise BadInput.of(
            "This model was not trained to write workflows.",
            ready.positions.where("writer.executor"),
            "`writer: {executor: ROLE}`: the policy writes, the executor runs",
            str(ready.workflow or ready.graph.path or "no workflow"),
            f"measure it with `aflow-tune eval {file.name}`, or name another --config",
        )
    say_prices(ready, ready.models)
    sampling = make_ready(ready, weights=weights, local_model=endpoint is None)
    if temperature is not None:
        sampling["temperature"] = temperature
    if endpoint is not None:
        check_endpoint(endpoint, [served_model or ""], key_variable)
    check_run_prompts(ready)
    workflow, _ = resolve_functions(ready)
    assert isinstance(workflow, WriterWorkflow)
    return Inferer(
        ready,
        weights,
        workflow=workflow,
        title=served_model or (found.name if found else Path(ready.model.model_path).name),
        endpoint=endpoint,
        served_model=served_model,
        key_variable=key_variable,
        sampling=sampling,
    )


@dataclass
class Inferer:
    """A policy with its executor; the models are loaded while the context is open.

    `weights` None: the base model. `title` is the policy's name for display; `sampling` its
    temperature, top_p, top_k and max_tokens. `seconds` bounds the solving of one problem, by
    default to `rollout.run_timeout`.
    """

    config: AflowConfig
    weights: Path | None
    workflow: WriterWorkflow
    title: str
    sampling: dict[str, float]
    endpoint: str | None = None
    served_model: str | None = None
    key_variable: str | None = None

    def __post_init__(self) -> None:
        self.seconds: float = self.config.rollout.run_timeout
        self._spend = RunSpend("", BudgetSection(), self.config.models)
        self._policy: RecordingClient | None = None
        self._auxiliary: dict[str, Any] = {}

    @property
    def make(self) -> str:
        """A fingerprint of what determines results besides the problem: models and settings."""
        config = self.config
        weights = None if self.weights is None else fingerprint(self.weights)
        policy = (self.endpoint and base_url(self.endpoint), self.served_model)
        auxiliary = [model.model_path for model in config.explorer.auxiliary_models]
        settings = (config.writer, sorted(config.models.items()), config.prompts, config.operators)
        parts = (config.model.model_path, weights, policy, self.sampling, config.seed)
        return repr((*parts, auxiliary, settings))

    @property
    def private(self) -> dict[str, str]:
        """Folders and addresses, each with a text to show to others instead. Reasons of failures
        may contain them, and a graph may return such a reason as its answer."""
        config = self.config
        paths = [model.model_path for model in (config.model, *config.explorer.auxiliary_models)]
        folders = [*paths, self.weights, config.checkpoint_root_dir, Path.home(), Path.cwd()]
        names = {
            str(folder): Path(str(folder)).name or "a folder"
            for folder in folders
            if folder and Path(str(folder)).is_absolute() and len(str(folder)) > 1
        }
        urls = [self.endpoint, *(settings.base_url for settings in config.models.values())]
        for url in filter(None, urls):
            for part in (base_url(url), url.rstrip("/"), urlsplit(url).netloc.rpartition("@")[2]):
                names[part] = "(an address)"
        return dict(sorted(names.items(), key=lambda item: -len(item[0])))

    async def __aenter__(self) -> Inferer:
        config = self.config
        async with contextlib.AsyncExitStack() as stack:
            local = await stack.enter_async_context(LocalModels())
            if self.endpoint is None:
                policy = await local.take(config, self.weights)
            else:
                name = self.served_model or ""
                policy = endpoint_model(config, self.endpoint, name, self.key_variable)
            self._policy = await recording_client(policy)
            models = local.auxiliary_chat_models(config)
            self._auxiliary = await stack.enter_async_context(models)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def solve(self, problem: Problem, sample: int = 0) -> Solved:
        """Ask the policy, run what it writes, and score the answer if the truth is known. Equal
        `sample` numbers give equal seeds.

        Raises:
            ModelError: the policy did not answer.
            TimeoutError: it took longer than `seconds`.
            SandboxUnavailable: no sandbox can be built here, so nothing was run.
        """
        assert self._policy is not None, "use `async with inferer:`, which loads the models"
        generate_kwargs: dict[str, Any] = dict(self.sampling)
        top_k = generate_kwargs.pop("top_k", None)
        if top_k and top_k > 0:
            generate_kwargs["extra_body"] = {"top_k": top_k}
        context, trace = RolloutContext(rewards=self.config.rewards), Trace()
        recorder = RolloutRecorder(
            self._policy,
            context,
            task_id="inference",
            seed=f"{self.config.seed}|inference|{sample}",
            generate_kwargs=generate_kwargs,
        )
        started = time.monotonic()
        try:
            with (
                use_policy(self.config.sandbox),
                use_prompts(self.config.prompts),
                self._spend.open(),
                context.activate(),
                trace.activate(),
            ):
                async with asyncio.timeout(self.seconds):
                    run = await self.workflow.write(
                        problem.text,
                        problem.type,
                        recorder.chat_model(),
                        entry_point=problem.entry_point,
                        auxiliary_models=self._auxiliary,
                    )
                got = solved(problem, run, trace, started, time.monotonic() - started)
                if problem.truth is not None:
                    got |= await self._reward(problem, run)
        finally:
            recorder.close()
        return got

    async def _reward(self, problem: Problem, run: WriterRun) -> dict[str, Any]:
        """Score and reward, or the reason why there is none."""
        benchmark, row = benchmark_row(problem, self.workflow.benchmark)
        score, reason = 0.0, "there is no answer"
        try:
            raise_if_models_failed(run.last)
            if run.last.executed.run.ok:
                found = await score_answer(benchmark, row, run.text, policy=self.config.sandbox)
                score, reason = scored(found), found.reason
            reward = run.reward(score, benchmark)
        except (Unscored, AflowTuneError) as error:
            return {"score_reason": str(error)}
        told = {"score": score, "score_reason": reason}
        return {**told, "reward": reward.reward, "parts": dict(reward.parts)}


def benchmark_row(problem: Problem, configured: str | None) -> tuple[str, dict[str, Any]]:
    """The benchmark whose rule scores a problem, and the problem as a row of it.

    The configured benchmark, if it has the problem's type; else for math GSM8K if the truth is a
    number and MATH if not, for code HumanEval, for qa HotpotQA.
    """
    text, truth = problem.text, problem.truth or ""
    name = (configured or "").lower()
    if TYPE_OF_BENCHMARK.get(name) != problem.type:
        math = "math"
        with contextlib.suppress(ValueError):
            if float(truth.strip().replace(",", "")) == last_number(truth):
                math = "gsm8k"
        name = {"math": math, "code": "humaneval", "qa": "hotpotqa"}[problem.type]
    rows: dict[str, dict[str, Any]] = {
        "gsm8k": {"question": text, "answer": f"#### {truth}"},
        "math": {"problem": text, "solution": truth},
        "hotpotqa": {"question": text, "answer": truth, "context": []},
        "drop": {"context": text, "ref_text": truth},
    }
    code = {"prompt": text, "entry_point": problem.entry_point or "", "test": truth}
    gold = "code" if name == "mbpp" else "canonical_solution"
    return name, rows.get(name) or {**code, gold: ""}


# Batches: problems from a file, results as lines of JSON


@dataclass(frozen=True)
class Row:
    """One line of the file. `number` counts from 1, blank lines aside; `key` is a digest of what
    determines its result: the row, the weights, the settings."""

    number: int
    problem: Problem
    key: str
    id: Any = None


def read_rows(file: Path, make: str, default_type: str | None = None) -> list[Row]:
    """The problems of a JSONL file. `make` is `Inferer.make`; `default_type` is the type of rows
    without one. Raises BadInput with the faulty lines."""
    title = "These problems cannot be asked."
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cure, expected = "name a JSONL file in UTF-8", "a file with a problem a line"
        raise BadInput.of(title, f"--batch {file}", expected, str(error), cure) from None
    rows: list[Row] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, content = f"{file}:{number}", _object(line)
        if content is None:
            example = '{"problem": "What is 2 + 3?", "type": "math", "truth": "5"}'
            faults.append(Fault(where, "a JSON object", f"{line!r:.60}", example))
            continue
        if default_type is not None and "problem_type" not in content:
            content.setdefault("type", default_type)
        text = json.dumps([make, content], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        try:
            problem = Problem.of(content, where)
            rows.append(Row(len(rows) + 1, problem, key, content.get("id")))
        except BadInput as error:
            faults += error.faults
    if not rows and not faults:
        faults.append(Fault(str(file), "at least one problem", "none", "add a line"))
    if faults:
        raise BadInput(title, faults[:20])
    return rows


async def run_batch(
    inferer: Inferer,
    rows: Sequence[Row],
    *,
    samples: int,
    at_once: int,
    out: Path | None,
    say: Callable[[str], None],
) -> int:
    """Solve every row `samples` times; results go to `out`, or to standard output. Returns the
    number of rows with an answer in at least one sample. Another call with the same `out` solves
    only what is missing or failed. Raises BadInput: `out` holds other results."""
    done = _kept(out, rows, samples) if out is not None else {}
    answered = {number for (number, _), got in done.items() if got}
    count, total = len(done), len(rows) * samples
    if done:
        say(f"{count} of {total} results are there from an earlier command")
    slots = asyncio.Semaphore(at_once)

    async def one(row: Row, sample: int) -> None:
        nonlocal count
        line: dict[str, Any] = {"row": row.number, "sample": sample, "key": row.key}
        if row.id is not None:
            line["id"] = row.id
        async with slots:
            try:
                line |= await inferer.solve(row.problem, sample)
            except (AflowTuneError, TimeoutError) as error:
                why = "timed out" if isinstance(error, TimeoutError) else str(error)
                line |= {"problem": row.problem.text, "answered": False, "error": why}
        if line["answered"]:
            answered.add(row.number)
        if out is None:
            sys.stdout.write(as_line(line).decode())
            sys.stdout.flush()
        else:
            append_line(out, as_line(line))
        count += 1
        told = "answered" if line["answered"] else line.get("error") or "no answer"
        say(f"{count} of {total}: row {row.number}: {told}")

    wanted = [(row, sample) for row in rows for sample in range(samples)]
    left = [(row, sample) for row, sample in wanted if (row.number, sample) not in done]
    await asyncio.gather(*(one(row, sample) for row, sample in left))
    return len(answered)


def _kept(out: Path, rows: Sequence[Row], samples: int) -> dict[tuple[int, int], bool]:
    """Whether there is an answer, by row and sample, from an earlier command. Removes lines with
    errors from the file. Raises BadInput: it holds something else."""
    if not out.exists():
        return {}
    drop_torn_line(out)
    keys = {row.number: row.key for row in rows}
    found: dict[tuple[int, int], bool] = {}
    good: list[bytes] = []
    lines = [line for line in out.read_bytes().split(b"\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        entry = _object(line) or {}
        row, sample = entry.get("row"), entry.get("sample")
        if (
            not isinstance(row, int)
            or not isinstance(sample, int)
            or entry.get("key") != keys.get(row, "no such row")
        ):
            raise BadInput.of(
                "The results cannot be added to this file.",
                f"{out}:{number}",
                "results of these problems by this model with these settings",
                "something else",
                "name a new file, or remove this one",
            )
        if "error" in entry:
            continue
        good.append(line + b"\n")
        if sample < samples:
            found[row, sample] = bool(entry.get("answered"))
    if len(good) < len(lines):
        write_whole(out, b"".join(good))
    return found


def _object(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
