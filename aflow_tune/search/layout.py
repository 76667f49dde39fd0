"""Writes what a search found: one workflow in our form, or its tree in AFlow's own layout.

AFlow's layout is what its optimizer leaves and reads again (`scripts/optimizer_utils`):

    WORKSPACE/DATASET/workflows/
      results.json                 a row a round: round, score, avg_cost, total_cost, time
      processed_experience.json    by father round: its score, what succeeded, what failed
      round_N/graph.py, prompt.py, __init__.py
      round_N/experience.json      what made it of its father, and both scores
      round_N/log.json             problems that it got wrong

Round 1 is the seed; then come workflows taken over from the pool, then every other that was raced.
AFlow's templates of operators, which its graphs import, are not written: copy the rounds into a
checkout of AFlow, which has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.files import write_whole
from aflow_tune.graph import inside
from aflow_tune.graph.graph import INSTRUCTIONS_FILE, PROMPTS_FILE, PromptText
from aflow_tune.graph.save import AFLOW_NAMES, save_round
from aflow_tune.operators import Operator
from aflow_tune.search.optimizer import Node, Tree
from aflow_tune.search.pool import Trial
from aflow_tune.search.state import WorkflowState

Describe = Callable[[str], tuple[str, str]]
"""The text and the expected answer of a problem, by its key."""

_PACKAGE = "__init__.py"
_EXPERIENCE, _LOG = "experience.json", "log.json"
_OF_A_ROUND = (
    inside.GRAPH_FILE, inside.PROMPT_FILE, PROMPTS_FILE, INSTRUCTIONS_FILE, _PACKAGE, _EXPERIENCE,
    _LOG,
)  # fmt: skip
_LOGGED_BELOW = 0.3  # AFlow's for F1; of right-or-wrong scores these are the wrong ones


def write_graph(
    folder: Path, state: WorkflowState, prompts: Mapping[str, PromptText] | None = None
) -> None:
    """Write a workflow so that `load_graph(folder)` gives it back; what another one left there
    goes. `prompts`: further ones, such as a run's own, that lose against the workflow's."""
    asked = {**(prompts or {}), **state.prompts}
    texts = dict(state.sources)
    texts |= {PROMPTS_FILE: _json(asked)} if asked else {}
    texts |= {INSTRUCTIONS_FILE: _json(state.instructions)} if state.instructions else {}
    for name, text in texts.items():
        write_whole(folder / name, text)
    for name in (inside.PROMPT_FILE, PROMPTS_FILE, INSTRUCTIONS_FILE):
        if name not in texts:
            (folder / name).unlink(missing_ok=True)


def write_layout(
    workspace: Path,
    tree: Tree,
    *,
    dataset: str | None = None,
    describe: Describe | None = None,
    operators: Mapping[str, type[Operator]] | None = None,
) -> dict[int, str]:
    """Write every workflow of a tree that was raced, with its scores, as rounds of AFlow.

    A score is the search's estimate, which is comparable between rounds: some ran on a few problems
    only. A cost is null if a price is unknown. Rounds of an earlier call for the same data set are
    replaced, so two task sets of one data set need a workspace each.

    Args:
        dataset: AFlow's name of the data set, which decides what its operators take. None: the task
            set's name.
        describe: None: the logs name problems by their keys.
        operators: the user's own.

    Returns:
        By round, why AFlow cannot run it; such a round has our source as it is.
    """
    name = re.sub(r"\W", "_", dataset or tree.taskset.name, flags=re.ASCII)
    name = AFLOW_NAMES.get(name.casefold(), name if name[:1].isalpha() else f"_{name}")
    workflows = workspace / name / "workflows"
    _clear(workflows)
    rounds = {node.key: number for number, node in enumerate(_raced(tree), 1)}
    results, processed, unfit = [], dict[int, dict[str, Any]](), dict[int, str]()
    for key, number in rounds.items():
        node, folder = tree.tried[key], workflows / f"round_{number}"
        refusal = _write_round(folder, node.state, operators)
        unfit |= {number: refusal} if refusal else {}
        results.append(_result(number, node))
        if log := [_mismatch(*one, describe) for one in node.trials.items() if _is_wrong(one[1])]:
            write_whole(folder / _LOG, _json(log))
        if node.edge is not None and node.parent is not None:
            experience = _experience(node, node.parent, rounds[node.parent.key])
            write_whole(folder / _EXPERIENCE, _json(experience))
            _process(processed, number, experience)
    write_whole(workflows / "results.json", _json(results))
    write_whole(workflows / "processed_experience.json", _json(processed))
    return unfit


def _raced(tree: Tree) -> list[Node]:
    """The workflows whose scores are known: the seed, those taken over, and in the order of the
    edges those whose race has ended. None if the seed was not measured yet."""
    if any(problem not in tree.root.trials for problem in tree.taskset.problems):
        return []
    ended = [edge for edge in tree.edges if not edge.refusal and edge.gain is not None]
    taken_over = [node for node in tree.tried.values() if node.edge is None]
    return [*taken_over, *(tree.tried[edge.child] for edge in ended if edge.child is not None)]


def _write_round(
    folder: Path, state: WorkflowState, operators: Mapping[str, type[Operator]] | None
) -> str:
    """Write graph.py, prompt.py and __init__.py; returns why AFlow cannot run them, if so."""
    try:
        save_round(replace(state.graph(operators), label=folder.name), folder)
        return ""
    except BadInput as error:
        write_graph(folder, state)
        for name in (inside.PROMPT_FILE, _PACKAGE):  # AFlow reads both
            if not (folder / name).exists():
                write_whole(folder / name, "")
        return "; ".join(f"{one.where}: {one.found}" for one in error.faults) or str(error)


def _result(number: int, node: Node) -> dict[str, Any]:
    cost, trials = node.outcome().usd, len(node.trials)
    return {
        "round": number,
        "score": node.value,
        "avg_cost": None if cost is None else cost / max(1, trials),
        "total_cost": cost,
        "time": datetime.now().isoformat(),
    }


def _experience(node: Node, parent: Node, father: int) -> dict[str, Any]:
    assert node.edge is not None
    return {
        "father node": father,
        "modification": node.edge.what or node.edge.kind,
        "before": parent.value,
        "after": node.value,
        "succeed": node.value > parent.value,
    }


def _process(
    processed: dict[int, dict[str, Any]], number: int, experience: Mapping[str, Any]
) -> None:
    """Add an experience to those of its father."""
    empty = {"score": experience["before"], "success": {}, "failure": {}}
    of_father = processed.setdefault(experience["father node"], empty)
    kind = "success" if experience["succeed"] else "failure"
    told = {"modification": experience["modification"], "score": experience["after"]}
    of_father[kind][number] = told


def _is_wrong(trial: Trial) -> bool:
    return trial.score is not None and trial.score < _LOGGED_BELOW


def _mismatch(problem: str, trial: Trial, describe: Describe | None) -> dict[str, str]:
    question, expected = (problem, "") if describe is None else describe(problem)
    return {
        "question": question,
        "right_answer": expected,
        "model_output": trial.answer or trial.reason,
        "extracted_output": trial.answer,
        "extract_answer_code": "None",
    }


def _clear(workflows: Path) -> None:
    """Remove the rounds of an earlier call, and of their folders nothing else."""
    for folder in workflows.glob("round_*"):
        for name in _OF_A_ROUND:
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            folder.rmdir()


def _json(value: Any) -> str:
    return json.dumps(value, indent=4, ensure_ascii=False) + "\n"
