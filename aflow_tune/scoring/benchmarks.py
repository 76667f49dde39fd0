"""The benchmarks: the question and gold answer of a row, and the two rules that score an answer.

`BENCHMARKS` is the registry; tasks of reasoning-gym, `reasoning_gym:TASK`, are made on demand. If a
scorer reaches no verdict, the answer is unscored (`Score.value` None), never 0; only what affects
every answer, such as a missing sandbox, is raised. Rules: docs/scoring.md.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import AflowTuneError, BadInput
from aflow_tune.sandbox.types import Limits
from aflow_tune.scoring import gym, mathematics, numbers, qa, rows
from aflow_tune.scoring.code import (
    NoProgram,
    check_code,
    check_together,
    helpers_of,
    published_program,
    strict_program,
)
from aflow_tune.scoring.rows import HubSource, Row
from aflow_tune.scoring.types import RIGHT, RULES, CannotScore, Rule, Score, wrong

Scorer = Callable[[str, Row], Score]  # answer, row; an exception makes the answer unscored
CODE_LIMITS = Limits(seconds=15.0)  # for all tests of a program, as in the public code
# Entry points for which the published rule adds what their prompt defines besides.
PUBLISHED_HELPERS = ("decode_cyclic", "decode_shift", "find_zero")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; its rows have all of `fields`."""

    name: str
    fields: Mapping[str, type]
    question: Callable[[Row], str]  # what a workflow is asked
    gold: Callable[[Row], str]  # an answer that must score 1; may raise CannotScore
    scorers: dict[Rule, Scorer] | None = None  # None for code, whose answers are programs
    hub: HubSource | None = None
    answer_form: str = ""  # a sentence for the prompt; empty if the questions say it
    form: str = r"\S"  # a regular expression to find in an answer of that form

    def load(self, source: Path | str | None = None, split: str | None = None) -> list[dict]:
        """Rows of a local file, or of the hub if `source` is None. Raises BadInput: the file or
        data set cannot be used; it lists faulty rows with their lines."""
        if source is not None:
            return rows.read_jsonl(Path(source), self.fields)
        if self.hub is None:
            title, where = f"{self.name} does not lie on the hub", f"benchmark {self.name}"
            raise BadInput.of(title, where, "a file of rows", "none", "give a local file")
        return rows.read_hub(self.hub, split)


async def score_answer(
    benchmark: Benchmark | str, row: Row, answer: str, rule: Rule = "strict", policy: str = "auto"
) -> Score:
    """The score of one answer by one rule. Raises as `score_both`."""
    return await _score(_checked(benchmark, row), row, answer, rule, policy)


async def score_both(
    benchmark: Benchmark | str, row: Row, answer: str, *, policy: str = "auto"
) -> dict[Rule, Score]:
    """The score of one answer by each rule. Raises BadInput: no benchmark has that name, or the
    row lacks its fields; SandboxUnavailable: the answer is code and no sandbox can be built."""
    chosen = _checked(benchmark, row)
    given = [_score(chosen, row, answer, rule, policy) for rule in RULES]
    return dict(zip(RULES, await asyncio.gather(*given), strict=True))


def find(benchmark: Benchmark | str) -> Benchmark:
    """The benchmark of a name, also `reasoning_gym:TASK`. Raises BadInput: there is none."""
    if isinstance(benchmark, Benchmark):
        return benchmark
    if benchmark.lower() in BENCHMARKS:  # AFlow writes GSM8K and HotpotQA
        return BENCHMARKS[benchmark.lower()]
    if benchmark.startswith(gym.PREFIX):
        return _gym_benchmark(benchmark.removeprefix(gym.PREFIX))
    known = (*BENCHMARKS, gym.PREFIX + "TASK")
    close = difflib.get_close_matches(benchmark.lower(), known, n=1)
    fix = f"use {close[0]}" if close else "use one of these"
    where = f"benchmark {benchmark!r}"
    raise BadInput.of("An unknown benchmark.", where, " | ".join(known), repr(benchmark), fix)


def with_form(problem: str, answer_form: str) -> str:
    """The problem's text with `answer_form` added, before a final `Answer:`; unchanged if empty."""
    if not answer_form:
        return problem
    text, mark = problem.removesuffix(_ANSWER), _ANSWER if problem.endswith(_ANSWER) else ""
    return f"{text.rstrip()}\n\n{answer_form}" + (f"\n\n{mark}" if mark else "")


def _checked(benchmark: Benchmark | str, row: Row) -> Benchmark:
    chosen = find(benchmark)
    fault = rows.field_fault(f"a row of {chosen.name}", row, chosen.fields)
    if fault is not None:
        raise BadInput(f"A row that is not one of {chosen.name}'s.", [fault])
    return chosen


async def _score(benchmark: Benchmark, row: Row, answer: str, rule: Rule, policy: str) -> Score:
    """The score by one rule; unscored if scoring itself fails. Raises AflowTuneError."""
    try:
        if benchmark.scorers is not None:
            # Some wait for a child process.
            return await asyncio.to_thread(benchmark.scorers[rule], answer, row)
        tests, entry_point, strict = row["test"], row["entry_point"], rule == "strict"
        find_program = strict_program if strict else published_program
        try:
            program = await asyncio.to_thread(find_program, answer, entry_point)
        except NoProgram as error:
            if not strict:  # our own bound, which the published rule does not have
                raise
            return wrong(str(error))
        graded: dict[str, Any] = {"limits": CODE_LIMITS, "policy": policy}
        if strict or entry_point in PUBLISHED_HELPERS:
            graded["helpers"] = helpers_of(row["prompt"], entry_point)
        check = check_code if strict else check_together
        verdict = await check(program, tests, entry_point, **graded)
    except AflowTuneError:
        raise
    except Exception as error:
        return Score(None, f"{type(error).__name__}: {error}"[:500])
    if verdict.passed is None:
        return Score(None, verdict.reason)
    return RIGHT if verdict.passed else wrong(verdict.reason)


def _gym_benchmark(task: str) -> Benchmark:
    gym.require_task(task)

    def gold(row: Row) -> str:
        if not isinstance(row["answer"], str):
            raise CannotScore("the row has no gold answer: any answer that verifies is right")
        return row["answer"]

    return Benchmark(
        name=gym.PREFIX + task,
        fields={"question": str, "metadata": dict},
        question=lambda row: str(row["question"]),
        gold=gold,
        scorers={
            "strict": functools.partial(gym.score_strict, task),
            "published": functools.partial(gym.score_published, task),
        },
    )


_ANSWER = "Answer:"  # the end of questions of HotpotQA and DROP
_CODE_ASKED = "# The answer is Python code: the whole function, with imports and helpers, once."
_CODE_FORM = r"^\s*(?:async\s+)?def\s"


def _hotpotqa_question(row: Row) -> str:
    context = "\n".join(" ".join(item[1]) for item in row["context"] if isinstance(item[1], list))
    return f"Context: {context}\n\nQuestion: {row['question']}\n\n{_ANSWER}"


def _by(
    strict: Callable[[str, str], Score], published: Callable[[str, str], Score], reference: str
) -> dict[Rule, Scorer]:
    return {
        "strict": lambda answer, row: strict(answer, row[reference]),
        "published": lambda answer, row: published(answer, row[reference]),
    }


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        name="gsm8k",
        fields={"question": str, "answer": str},
        question=lambda row: row["question"],
        gold=lambda row: row["answer"],
        scorers=_by(numbers.score_strict, numbers.score_published, "answer"),
        hub=HubSource("openai/gsm8k", "main", "test"),
        answer_form="The answer is one number, at the end of what is written.",
        form=r"\d",
    ),
    "math": Benchmark(
        name="math",
        fields={"problem": str, "solution": str},
        question=lambda row: row["problem"],
        gold=lambda row: row["solution"],
        scorers=_by(mathematics.score_strict, mathematics.score_published, "solution"),
        hub=HubSource("HuggingFaceH4/MATH-500", None, "test"),
        answer_form=r"The answer stands in \boxed{}, once, at the end of what is written.",
        form=r"\\boxed",
    ),
    "humaneval": Benchmark(
        name="humaneval",
        fields={"prompt": str, "entry_point": str, "canonical_solution": str, "test": str},
        question=lambda row: row["prompt"],
        gold=lambda row: row["prompt"] + row["canonical_solution"],
        hub=HubSource("openai/openai_humaneval", None, "test"),
        answer_form=_CODE_ASKED,
        form=_CODE_FORM,
    ),
    "mbpp": Benchmark(
        name="mbpp",
        fields={"prompt": str, "entry_point": str, "code": str, "test": str},
        question=lambda row: row["prompt"],
        gold=lambda row: row["code"],
        hub=HubSource("google-research-datasets/mbpp", "sanitized", "test", rows.mbpp_row),
        answer_form=_CODE_ASKED,
        form=_CODE_FORM,
    ),
    "hotpotqa": Benchmark(
        name="hotpotqa",
        fields={"question": str, "answer": str, "context": list},
        question=_hotpotqa_question,
        gold=lambda row: row["answer"],
        scorers=_by(qa.hotpotqa_strict, qa.hotpotqa_published, "answer"),
        hub=HubSource("hotpotqa/hotpot_qa", "distractor", "validation", rows.hotpotqa_row),
        answer_form="The answer is a name, date, number or phrase, or yes or no, and nothing else.",
    ),
    "drop": Benchmark(
        name="drop",
        fields={"context": str, "ref_text": str},
        question=lambda row: row["context"],
        gold=lambda row: qa.split(row["ref_text"])[0],
        scorers=_by(qa.drop_strict, qa.drop_published, "ref_text"),
        hub=HubSource("ucinlp/drop", None, "validation", rows.drop_row),
        answer_form="The answer is a name, a date, a number or a phrase, and nothing else; several "
        "that are asked for are joined by 'and'.",
    ),
}


CONCURRENCY = 4  # answers scored at the same time


@dataclass(frozen=True)
class Scores:
    """The scores of a list of answers, in the same order."""

    rows: tuple[dict[Rule, Score], ...]

    def values(self, rule: Rule) -> list[float | None]:
        """The values by one rule; None for unscored answers."""
        return [scores[rule].value for scores in self.rows]

    @property
    def mean(self) -> float | None:
        """The mean strict score over scored answers; None if there are none."""
        values = [value for value in self.values("strict") if value is not None]
        return sum(values) / len(values) if values else None

    @property
    def unscored(self) -> int:
        """How many answers the strict rule could not score."""
        return self.values("strict").count(None)

    def to_json(self) -> dict[str, Any]:
        """What `aflow-tune score --json` prints."""
        by_rule: dict[str, Any] = {rule: self.values(rule) for rule in RULES}
        return {"mean": self.mean, **by_rule, "unscored": self.unscored}


async def score_all(
    benchmark: Benchmark,
    given: Sequence[Row],
    answers: Sequence[str] | None = None,
    *,
    policy: str = "auto",
) -> Scores:
    """Score one answer per row; None: each row's gold answer. Raises as `score_both`."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(row: Row, answer: str | None) -> dict[Rule, Score]:
        async with gate:
            try:
                text = benchmark.gold(row) if answer is None else answer
            except CannotScore as error:
                return dict.fromkeys(RULES, Score(None, str(error)))
            return await score_both(benchmark, row, text, policy=policy)

    texts = [None] * len(given) if answers is None else answers
    return Scores(tuple(await asyncio.gather(*(one(*it) for it in zip(given, texts, strict=True)))))


def read_answers(path: Path, count: int) -> list[str]:
    """The texts of `count` lines `{"answer": TEXT}`. Raises BadInput: the file differs."""
    lines = rows.read_jsonl(path, {"answer": str})
    if len(lines) != count:
        title, fix = f"{path} does not fit the rows", "give one answer a row, in their order"
        raise BadInput.of(title, str(path), f"{count} answers", f"{len(lines)} answers", fix)
    return [line["answer"] for line in lines]
