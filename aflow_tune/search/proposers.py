"""Who proposes changes of a workflow: typed edits without a model, and models that write.

`Edits` lists every typed edit of a workflow and draws from them by what such edits were worth so
far. It foresees routers: from the trials of two workflows it is known, without running anything,
what a router between them would score on the problems that both were run on.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aflow_tune.errors import RunFailed
from aflow_tune.models.types import ModelError
from aflow_tune.operators import Operator
from aflow_tune.search.edits import Editor, Move, moves
from aflow_tune.search.optimizer import Node, Proposal, Tree
from aflow_tune.search.state import WorkflowState
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.prompting import operator_line
from aflow_tune.writer.types import CheckLimits

GRAFT = "graft"
PARTNERS = 8
"""Most routers that are foreseen for one workflow at a time."""
_PLAIN_GAIN = 0.1  # what an edit of unknown worth is taken to gain if it wins
_LEAST = 0.02  # a router that is foreseen to gain less is not proposed


@dataclass(frozen=True)
class Router:
    """Problems with `word` go to `yes`, the others to `no` (keys of workflows); `gain` is foreseen
    for the one of the two that is expanded."""

    word: str
    yes: str
    no: str
    gain: float

    @property
    def name(self) -> tuple[str, str, str]:
        return self.word, self.yes, self.no


def foreseen(
    own: Node, other: Node, problems: Sequence[str], words: Mapping[str, Sequence[bool]]
) -> list[Router]:
    """The routers between a workflow and another of its tree that should gain something.

    Args:
        problems: those that races of the task set are run on.
        words: by word, which of the problems hold it.
    """
    pairs = zip(own.scores(problems), other.scores(problems), strict=True)
    gains = [None if a is None or b is None else b - a for a, b in pairs]
    found = []
    for word, holds in words.items():
        for side in (True, False):  # which problems go to the other workflow
            there = [gain for gain, held in zip(gains, holds, strict=True) if held is side]
            known = [gain for gain in there if gain is not None]
            # Shrunk towards 0, as few problems say little.
            gain = sum(known) / (len(known) + 1) * len(there) / len(holds)
            if len(known) >= 2 and gain >= _LEAST:
                pair = (other.key, own.key) if side else (own.key, other.key)
                found.append(Router(word, *pair, gain))
    return found


@dataclass
class Edits:
    """Typed edits, without a model.

    Args:
        operators: those that a workflow may use.
        words: by task set and word, which of its race problems hold the word.
        instructions, joints: by task set, see `edits.moves`.
        problem_types: by task set, which shipped templates fit; without an entry none is adopted.
        own: the user's operators, that graphs need to be read.
    """

    operators: Mapping[str, type[Operator]]
    words: Mapping[str, Mapping[str, Sequence[bool]]]
    instructions: Mapping[str, Mapping[str, str]]
    joints: Mapping[str, Sequence[str]]
    problem_types: Mapping[str, str | None] = field(default_factory=dict)
    own: Mapping[str, type[Operator]] = field(default_factory=dict)
    name: str = "edits"

    def __post_init__(self) -> None:
        self._moves: dict[tuple[str, str], list[Move]] = {}
        self._used: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        self._routers: dict[tuple[str, str], tuple[list[str], list[Router]]] = {}

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
        """The `count` edits that were drawn highest; none comes twice for one workflow."""
        found = list(itertools.islice(self._new(tree, node), count))
        self._used[tree.taskset.name, node.key].update(name for name, _, _ in found)
        return [proposal for _, _, proposal in found]

    def menu(self, tree: Tree, node: Node, count: int) -> list[Move | Router]:
        """As `propose`, for someone else to choose from: they stay unused."""
        return [change for _, change, _ in itertools.islice(self._new(tree, node), count)]

    def _new(
        self, tree: Tree, node: Node
    ) -> Iterator[tuple[tuple[str, ...], Move | Router, Proposal]]:
        """As `_drawn`, with their proposals, those that make a workflow that was not tried."""
        for name, change in self._drawn(tree, node):
            proposal = self.made(tree, change)
            if proposal.state is None or proposal.state.key not in tree.tried:
                yield name, change, proposal

    def _drawn(self, tree: Tree, node: Node) -> list[tuple[tuple[str, ...], Move | Router]]:
        """Each edit left of a workflow and a name for it, highest drawn first."""
        place = tree.taskset.name, node.key
        used = self._used.setdefault(place, set())
        if place not in self._moves:
            self._moves[place] = self.of(tree, node)
        drawn: list[tuple[float, tuple[str, ...], Move | Router]] = []
        for number, move in enumerate(self._moves[place]):
            chance = tree.draw.betavariate(*tree.beta(move.what, move.kind))
            worth = max(tree.search.value_of(tree.place(node), move.kind), 0.0)
            drawn.append((chance * (_PLAIN_GAIN + worth), (str(number),), move))
        for router in self.routers(tree, node)[:PARTNERS]:
            chance = tree.draw.betavariate(*tree.beta(GRAFT))
            drawn.append((2 * chance * router.gain, router.name, router))
        drawn.sort(key=lambda item: -item[0])
        return [(name, change) for _, name, change in drawn if name not in used]

    def routers(self, tree: Tree, node: Node) -> list[Router]:
        """Those between a workflow and all others that should gain the most, best first."""
        name = tree.taskset.name
        words, problems = self.words.get(name, {}), tree.taskset.problems
        # What a race showed stays: only those that were raced since are looked at.
        seen, found = self._routers.setdefault((name, node.key), ([], []))
        for key in itertools.islice(tree.tried, len(seen), None):
            other = tree.tried[key]
            if not other.trials:
                break
            seen.append(key)
            found += foreseen(node, other, problems, words) if other is not node else []
        return sorted(found, key=lambda router: -router.gain)

    def made(self, tree: Tree, change: Move | Router) -> Proposal:
        """The proposal of one edit."""
        if isinstance(change, Router):
            state = self.grafted(tree, change)
            refusal = "" if state is not None else "the two cannot be joined"
            return Proposal(state, self.name, GRAFT, f"route {change.word!r}", refusal)
        state = WorkflowState.of(tree.taskset.name, change.graph)
        return Proposal(state, self.name, change.kind, change.what)

    def of(self, tree: Tree, node: Node) -> list[Move]:
        """Every typed edit of a workflow but routers."""
        name = tree.taskset.name
        graph = node.state.graph(self.own)
        return list(
            moves(
                graph,
                self.operators,
                instructions=self.instructions.get(name, {}),
                joints=self.joints.get(name, ()),
                problem_type=self.problem_types.get(name),
                adopt=node is tree.root and name in self.problem_types,
            )
        )

    def grafted(self, tree: Tree, router: Router) -> WorkflowState | None:
        """The two workflows below one router; None if they cannot be joined."""
        yes, no = (tree.tried[key].state.graph(self.own) for key in (router.yes, router.no))
        joined = Editor(yes, self.operators).graft(no, router.word)
        return None if joined is None else WorkflowState.of(tree.taskset.name, joined)


Messages = Sequence[Mapping[str, str]]
Ask = Callable[[Messages, int, int | None], Awaitable[tuple[str, dict[str, Any]]]]
"""Asks a model with a seed, for at most so many tokens (None: its own limit). Returns its reply and
what to keep of the call: `tokens_used`, `usd`, and of the policy what it trains on. Raises
ModelError."""

MENU = 8
"""Typed edits that a model may choose from by number."""
_GIVE_UP = 12
_MOST_KEPT = 2000
"""Most characters of a reply or a refusal in the pool."""
_FAILURES = 3
"""Failed problems that a model is shown."""
_TRIED = 4
_ASKED = """\
A workflow answers problems with operators that call a language model. Propose one change of it that
makes more answers right.
{operators}
The workflow, which answers {score} of {problems} problems right:
{workflow}
Problems that it gets wrong:
{failures}
{tried}
Changes to choose from:
{menu}
{reply}"""
_REPLY = (
    'Reply with {"edit": NUMBER} to choose one, or with a whole new workflow as one JSON object '
    '{"prompts": {...}, "graph_code": "..."}.'
)
_REPLY_SHORT = "Answer with one number from 1 to {most}: the change to make. Number:"
"""Where a whole workflow does not fit: also a base model that continues the text answers that."""
_TOKENS_OF_A_NUMBER = 4
_CHOICE = re.compile(r'"edit"\s*:\s*"?(\d+)|\A\W*(\d+)')


@dataclass
class Written:
    """Changes that a model proposes: the number of a typed edit, or a whole workflow.

    Args:
        name: policy or teacher.
        ask: asks the model.
        edits: what it may choose from.
        describe: a problem's text and expected answer, by its key.
        fits: whether a prompt is short enough for the model; of one that is not, parts are left
            out, the source first.
        check: what a workflow may use at worst.
    """

    name: str
    ask: Ask
    edits: Edits
    describe: Callable[[str, str], tuple[str, str]]
    check: CheckLimits = field(default_factory=CheckLimits)
    fits: Callable[[Messages], bool] = lambda messages: True

    def __post_init__(self) -> None:
        self.failures = 0
        """Calls in a row that failed."""

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
        """`count` answers of the model, asked at once. A call that fails yields a refused proposal;
        raises RunFailed after `_GIVE_UP` of them in a row, as the model seems to be down."""
        menu = self.edits.menu(tree, node, MENU)
        messages = self.messages(tree, node, menu)
        most = None if _REPLY in messages[0]["content"] else _TOKENS_OF_A_NUMBER
        if not menu and most is not None:
            return []
        first, place = len(tree.edges), f"{tree.settings.seed}/{tree.taskset.name}"
        seeds = [zlib.crc32(f"{place}/{first + number}".encode()) for number in range(count)]
        replies = await asyncio.gather(*(self._reply(messages, seed, most) for seed in seeds))
        found = []
        for text, record in replies:
            self.failures = self.failures + 1 if text is None else 0
            if self.failures >= _GIVE_UP:
                raise RunFailed(f"{self.name} failed {_GIVE_UP} times in a row: {record['failed']}")
            found.append(self._read(tree, node, text, record, menu))
        return found

    async def _reply(
        self, messages: Messages, seed: int, most_tokens: int | None
    ) -> tuple[str | None, dict[str, Any]]:
        try:
            return await self.ask(messages, seed, most_tokens)
        except ModelError as error:
            return None, {"failed": str(error)}

    def _read(
        self,
        tree: Tree,
        node: Node,
        text: str | None,
        record: dict[str, Any],
        menu: Sequence[Move | Router],
    ) -> Proposal:
        if text is None:
            return Proposal(None, self.name, "unanswered", "", record["failed"], record)
        record = {**record, "text": text[:_MOST_KEPT]}
        found = _CHOICE.search(text)
        chosen = int((found[1] or found[2])[:9]) if found else None
        if chosen is not None and 1 <= chosen <= len(menu):
            made = self.edits.made(tree, menu[chosen - 1])
            return replace(made, proposer=self.name, record=record)
        verdict = check_written(text, operators=self.edits.operators, limits=self.check)
        refusal = "; ".join(map(str, verdict.refusals))[:_MOST_KEPT]
        if verdict.graph is None:
            why = refusal if chosen is None else f"{chosen} is no number of the list"
            return Proposal(None, self.name, "unreadable", "", why, record)
        state = WorkflowState.of(tree.taskset.name, verdict.graph)
        return Proposal(state, self.name, "written", "a new workflow", refusal, record)

    def messages(
        self, tree: Tree, node: Node, menu: Sequence[Move | Router]
    ) -> list[dict[str, str]]:
        """What the model is asked about a workflow: its source, its failures, what was tried.
        Raises RunFailed: nothing of it fits."""
        problems = tree.taskset.problems
        failed = [p for p in problems if (t := node.trials.get(p)) is not None and t.score != 1]
        shown = []
        for problem in failed[:_FAILURES]:
            question, expected = self.describe(tree.taskset.name, problem)
            answer = node.trials[problem].answer or node.trials[problem].reason
            shown.append(
                f"- {question[:300]}\n  answered {answer[:80]!r}, expected {expected[:80]!r}"
            )
        tried = [
            f"- {edge.what}: {edge.gain:+.2f}"
            for edge in tree.edges
            if edge.parent == node.key and edge.gain is not None
        ][-_TRIED:]
        lines = [f"{number}. {_name(change)}" for number, change in enumerate(menu, 1)]
        scores = [score for score in node.scores(problems) if score is not None]
        operators = [operator_line(kind, self.check) for kind in self.edits.operators.values()]
        whole = as_text(node.state.instructions, node.state.code)
        parts = {
            "operators": "Operators and the keys they return:\n" + "\n".join(operators),
            "workflow": whole,
            "failures": "\n".join(shown) or "none",
            "tried": "Already tried:\n" + "\n".join(tried) if tried else "",
            "reply": _REPLY,
        }
        given = {"score": f"{sum(scores):g}", "problems": len(scores), "menu": "\n".join(lines)}
        reply = _REPLY_SHORT.format(most=len(menu))
        short = {**parts, "operators": "", "workflow": node.state.structure, "reply": reply}
        few = {**short, "tried": "", "failures": "".join(shown[:1])}
        for these in (parts, short, few, {**few, "failures": "(they do not fit)"}):
            text = re.sub(r"\n{2,}", "\n", _ASKED.format(**given, **these))
            messages = [{"role": "user", "content": text}]
            if self.fits(messages):
                return messages
        raise RunFailed(f"{self.name} cannot be asked: its shortest prompt is too long for it")


def _name(change: Move | Router) -> str:
    return change.what if isinstance(change, Move) else f"route {change.word!r}"
