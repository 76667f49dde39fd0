"""The operators that only call a model: eight of AFlow's ten.

The ensembles choose one of several solutions, labelled A to Z, AA, AB and so on. Equal texts stay
separate candidates; a candidate that is an operator's whole result is shown as text and returned
unchanged, as in AFlow; empty candidates are not shown. If no vote can be read, the most frequent
candidate is returned (the first of equals), with the outcome 'unreadable'.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from aflow_tune.errors import BadInput
from aflow_tune.operators.base import (
    READ_OUTCOMES,
    RETRIES,
    Operator,
    OperatorResult,
    Outcome,
    whole_number,
)
from aflow_tune.operators.fields import Field, Form, Kind, labels
from aflow_tune.operators.prompts import Prompt, form_text

T = TypeVar("T")
LETTER = "solution_letter"
VOTES = 5
MAX_VOTES = 100
_NO_TEXT = "no candidate has a text"


class Custom(Operator):
    """Follows an instruction on an input and returns the whole reply."""

    fields = (Field("response"),)
    form = Form.TEXT
    asks = {"main": Prompt(needs=("input",), may=("instruction",))}
    returns = {"response": "what the model replied"}

    async def run(
        self, input: str, instruction: str = "", mode: str | None = None
    ) -> OperatorResult:
        """The reply to the instruction directly followed by the input, as in AFlow."""
        return await self.ask({"input": input, "instruction": instruction}, mode=mode)


class AnswerGenerate(Operator):
    """Reasons step by step about a task and answers it."""

    fields = (
        Field("thought", description="your reasoning, step by step", required=False),
        Field("answer", description="the final answer and nothing else"),
    )
    asks = {"main": Prompt(needs=("input",))}

    async def run(self, input: str, mode: str | None = None) -> OperatorResult:
        """`thought` may be empty; a reply without `answer` is unreadable."""
        return await self.ask({"input": input}, mode=mode)


class CustomCodeGenerate(Operator):
    """Writes a Python program that defines a function."""

    fields = (Field("response", Kind.CODE, "the whole program"),)
    form = Form.CODE
    asks = {"main": Prompt(needs=("problem",), may=("instruction", "entry_point"))}
    returns = {"response": "the program, which defines the entry point"}

    async def run(
        self, problem: str, entry_point: str = "", instruction: str = ""
    ) -> OperatorResult:
        """A reply without Python that defines `entry_point` is unreadable."""
        fields = [replace(self.fields[0], entry_point=entry_point or "")]
        values = {"problem": problem, "entry_point": entry_point, "instruction": instruction}
        return await self.ask(values, fields=fields)


class Format(Operator):
    """Takes the final answer out of a worked solution."""

    fields = (Field("response"),)
    form = Form.TEXT
    asks = {"main": Prompt(needs=("solution",), may=("problem",))}
    returns = {"response": "the answer alone", "solution": "the same"}

    async def run(self, problem: str, solution: str, mode: str | None = None) -> OperatorResult:
        """The answer, under both keys that AFlow's graphs use."""
        answer = await self.ask({"problem": problem, "solution": solution}, mode=mode)
        answer["solution"] = answer["response"]
        return answer


class Review(Operator):
    """Checks a solution and says whether it is right."""

    fields = (
        Field("review_result", Kind.BOOL, "whether the solution is right"),
        Field("feedback", description="what is wrong with it and how to mend it", required=False),
    )
    asks = {"main": Prompt(needs=("solution",), may=("problem",))}

    async def run(self, problem: str, solution: str, mode: str | None = None) -> OperatorResult:
        """`review_result` is a bool, and False if the review is unreadable."""
        return await self.ask({"problem": problem, "solution": solution}, mode=mode)


class Revise(Operator):
    """Writes a solution anew after a review."""

    fields = (Field("solution", description="the whole corrected solution"),)
    asks = {"main": Prompt(needs=("solution", "feedback"), may=("problem",))}

    async def run(
        self, problem: str, solution: str, feedback: str, mode: str | None = None
    ) -> OperatorResult:
        """An unreadable revision returns the solution unchanged."""
        values = {"problem": problem, "solution": solution, "feedback": feedback}
        revised = await self.ask(values, mode=mode)
        if revised.outcome is Outcome.UNREADABLE:
            revised["solution"] = solution
        return revised


class _Ensemble(Operator):
    """Shared by both ensembles: checking the candidates, and one vote."""

    fields = (
        Field("thought", description="how the candidates compare", required=False),
        Field(LETTER, Kind.CHOICE, "the label of the candidate that you choose"),
    )
    asks = {"main": Prompt(needs=("solutions",), may=("problem",))}

    def _candidates(self, solutions: Sequence[Any]) -> tuple[list[str], list[int]]:
        """The candidates as texts, and the indices of those that are not empty."""
        where, kinds = f"{self.caller}: solutions", (str, int, float, Mapping, type(None))
        good = isinstance(solutions, Sequence) and not isinstance(solutions, str)
        if not (good and solutions and all(isinstance(item, kinds) for item in solutions)):
            expected = "a list of at least one text or result"
            title, fix = "There is nothing to choose from.", "pass the list of solutions"
            raise BadInput.of(title, where, expected, f"{solutions!r:.80}", fix)
        texts = [_shown(item) for item in solutions]
        return texts, [place for place, text in enumerate(texts) if text.strip()]

    async def _vote(
        self, problem: str, candidates: Sequence[str], order: Sequence[int], mode: str | None
    ) -> tuple[int | None, OperatorResult]:
        """The index of the chosen candidate, or None. They are shown in `order`."""
        names = labels(len(order))
        shown = [
            form_text("candidate", {"label": name, "solution": candidates[place]})
            for name, place in zip(names, order, strict=True)
        ]
        fields = [self.fields[0], replace(self.fields[1], choices=names)]
        values = {"problem": problem, "solutions": "\n\n".join(shown)}
        answer = await self.ask(values, fields=fields, mode=mode)
        if answer.outcome not in READ_OUTCOMES:
            return None, answer
        return order[names.index(answer[LETTER])], answer


class ScEnsemble(_Ensemble):
    """Chooses the solution whose result most solutions agree on, in one vote."""

    returns = {"response": "the chosen solution"}

    async def run(self, solutions: list[str], problem: str = "") -> OperatorResult:
        """The chosen candidate. `BadInput`: no candidates, or one is neither text nor result."""
        candidates, order = self._candidates(solutions)
        if not order:
            chosen = _given(solutions, 0)
            return OperatorResult({"response": chosen}, Outcome.UNREADABLE, _NO_TEXT)
        place, vote = await self._vote(problem, candidates, order, None)
        place = _most_frequent(candidates, order) if place is None else place
        return OperatorResult({"response": _given(solutions, place)}, vote.outcome, vote.reason)


class MdEnsemble(_Ensemble):
    """Chooses the best solution by majority over several votes, shuffled each time.

    Shuffling cancels a preference for positions. The orders depend on `seed`, the problem and the
    candidates only, so equal calls send equal prompts.

    Args:
        vote_count: number of votes, from 1 to 100.
        seed: of the orders in which candidates are shown.
    """

    returns = {"solution": "the chosen solution"}

    def __init__(
        self,
        llm: Any,
        name: str | None = None,
        prompts: Any = None,
        vote_count: int = VOTES,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(llm, name, prompts, **settings)
        whole_number(f"{self.caller}: vote_count", vote_count, 1, MAX_VOTES)
        self.vote_count, self.seed = vote_count, seed

    @classmethod
    def most_calls(
        cls, *, retries: int = RETRIES, vote_count: int | None = VOTES, **settings: Any
    ) -> int:
        """One call for each vote, each with its retries."""
        return (MAX_VOTES if vote_count is None else vote_count) * (1 + retries)

    async def run(
        self, solutions: list[str], problem: str = "", mode: str | None = None
    ) -> OperatorResult:
        """The candidate with most votes, the first of equals. Raises as ScEnsemble."""
        candidates, filled = self._candidates(solutions)
        if not filled:
            chosen = _given(solutions, 0)
            return OperatorResult({"solution": chosen}, Outcome.UNREADABLE, _NO_TEXT)
        orders = []
        drawn = random.Random(repr((self.seed, problem, candidates)))
        for _ in range(self.vote_count):
            drawn.shuffle(order := list(filled))
            orders.append(order)
        votes = await together([self._vote(problem, candidates, order, mode) for order in orders])
        tally = Counter(place for place, _ in votes if place is not None)
        lost = self.vote_count - tally.total()
        if not tally:
            chosen = _given(solutions, _most_frequent(candidates, filled))
            reason = f"no vote could be read: {votes[0][1].reason}"
            return OperatorResult({"solution": chosen}, Outcome.UNREADABLE, reason)
        winner = min(tally, key=lambda place: (-tally[place], place))
        plain = all(vote.outcome is Outcome.ANSWERED for _, vote in votes)
        reason = f"{lost} of {self.vote_count} votes could not be read" if lost else ""
        outcome = Outcome.ANSWERED if plain else Outcome.REPAIRED
        return OperatorResult({"solution": _given(solutions, winner)}, outcome, reason)


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; if one raises, the others are cancelled before the exception leaves."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _most_frequent(candidates: Sequence[str], places: Sequence[int]) -> int:
    counts = Counter(candidates[place].strip() for place in places)
    return max(places, key=lambda place: counts[candidates[place].strip()])


def _shown(item: Any) -> str:
    """A candidate's text; empty for None or a result whose values are all empty."""
    if isinstance(item, Mapping):
        return str(dict(item)) if any(str(value).strip() for value in item.values()) else ""
    return "" if item is None else str(item)


def _given(solutions: Sequence[Any], place: int) -> Any:
    """The candidate as the caller passed it; a number as its text."""
    item = solutions[place]
    return item if isinstance(item, Mapping) else _shown(item)
