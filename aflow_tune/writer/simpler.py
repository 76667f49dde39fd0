"""A straight line of operators, built by us: what stands in for a graph that failed.

One operator answers the problem; Test for code, Format for other problems works on its answer if
it was named too. Nothing else: what judges, votes and revises is what a graph that failed did
more, and costs calls. How an operator is called and which of its values is the
answer follow from its own signature and declarations, so operators of the user's take part as
well. Nothing that the policy wrote goes into the code: only which operators it named.

Left to others: when such a graph runs (`execute.py`).
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping, Sequence

from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph
from aflow_tune.operators import Operator

INSTRUCTIONS: Mapping[str, str] = {
    "math": "Solve the problem step by step, and end with the final answer.",
    "code": "Write the Python function that the task asks for.",
    "qa": "Answer the question from what is given, in as few words as it allows.",
}
"""By problem type: what an operator is told that takes an instruction and was given none."""

_FIRST: Mapping[str, tuple[str, ...]] = {
    "math": ("Programmer", "AnswerGenerate", "Custom"),
    "code": ("CustomCodeGenerate", "Custom", "Programmer"),
    "qa": ("AnswerGenerate", "Custom", "Programmer"),
}
"""By problem type: who answers, if more than one operator could."""
_PROBLEM = ("problem", "input", "question", "task")
_ANSWERS = ("answer", "output", "response", "solution")
"""Keys of a result that hold an answer, the best first."""

_CODE = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
{built}

    async def __call__(self, problem{entry_point}):
{line}
        return solution, self.llm.get_usage_summary()["total_cost"]
"""


def straight_line(
    named: Sequence[str],
    operators: Mapping[str, type[Operator]],
    problem_type: str,
    entry_point: bool,
) -> Graph | None:
    """A graph of some of these operators, each called once at most; None where none can answer.

    Args:
        named: the operators that it may be made of, in an order of preference.
        operators: what the names mean; names that are not among them are passed over.
        entry_point: whether the problem names a function to write.
    """
    known = list(dict.fromkeys(name for name in named if name in operators))
    ranks = _FIRST.get(problem_type, ())
    # A stable sort: what no rank is known of keeps its order, behind the others.
    known.sort(key=lambda name: ranks.index(name) if name in ranks else len(ranks))
    have = {*_PROBLEM} | ({"entry_point"} if entry_point else set())
    first = next((name for name in known if _can_answer(operators[name], have)), None)
    if first is None:
        return None
    used = [first]
    if problem_type == "code":
        used += ["Test"] if entry_point and "Test" in known else []
    else:
        used += ["Format"] if "Format" in known else []
    lines = [_call(name, operators[name], {*have, "solution"}) for name in used]
    code = _CODE.format(
        built="\n".join(
            f"        self.{_instance(name)} = operator.{name}(self.llm)" for name in used
        ),
        line="\n".join(f"        {line}" for line in lines),
        entry_point=", entry_point" if entry_point else "",
    )
    own = {name: kind for name, kind in operators.items() if name in used}
    return Graph(
        "a straight line of " + ", ".join(used),
        {inside.GRAPH_FILE: code},
        operators=own,
        instructions=default_instructions(
            {_instance(name): name for name in used}, own, problem_type
        ),
    )


def default_instructions(
    instances: Mapping[str, str], operators: Mapping[str, type[Operator]], problem_type: str
) -> dict[str, str]:
    """By instance, an instruction for those whose operator takes one as an argument."""
    return {
        instance: INSTRUCTIONS.get(problem_type, INSTRUCTIONS["math"])
        for instance, name in instances.items()
        if name in operators
        and "instruction" in inspect.signature(operators[name].__call__).parameters
    }


def _can_answer(kind: type[Operator], have: set[str]) -> bool:
    """Whether it answers a problem by itself: it takes the problem, and needs nothing else."""
    names = _parameters(kind)
    needed = {name for name, required in names.items() if required}
    return needed <= have and bool(set(_PROBLEM) & set(names)) and _answer_key(kind) is not None


def _parameters(kind: type[Operator]) -> dict[str, bool]:
    """Names of the arguments of a call, and whether they have to be given."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    items = list(inspect.signature(kind.__call__).parameters.values())[1:]
    return {item.name: item.default is item.empty for item in items if item.kind not in variable}


def _answer_key(kind: type[Operator]) -> str | None:
    keys = tuple(kind.returns) or tuple(item.name for item in kind.fields)
    return next((key for key in _ANSWERS if key in keys), None)


def _instance(name: str) -> str:
    lower = name.lower()
    return f"{lower}_" if keyword.iskeyword(lower) or lower == "llm" else lower


def _call(name: str, kind: type[Operator], have: set[str]) -> str:
    call = f"self.{_instance(name)}({_arguments(kind, have)})"
    return f"solution = (await {call})['{_answer_key(kind)}']"


def _arguments(kind: type[Operator], have: set[str]) -> str:
    names = [name for name in _parameters(kind) if name in have]
    return ", ".join(f"{name}={'problem' if name in _PROBLEM else name}" for name in names)
