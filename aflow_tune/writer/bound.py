"""How much a written graph can cost at worst.

The graph is followed on every path (`following/`), from its constructor to its answer. One call
after the other adds up, of branches the dearer one counts, and a loop counts as often as it can
turn: over `range(3)`, over a list whose length is known (also one that a loop with a known number
of turns has filled), by an evident counter. A loop that calls nothing may turn as often as it
likes. Where it calls something and its turns cannot be told, the graph has no bound and is
refused.

A call of an operator counts as many calls of models as the operator itself says that it can make
(`Operator.most_calls`), a call of a model as many tokens as one call may have. These are upper
bounds for graphs that pass the check; running enforces them all the same.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from aflow_tune.graph.shape import Shape, workflow_methods
from aflow_tune.graph.tree import children
from aflow_tune.operators import Operator
from aflow_tune.writer.following.statements import Walk
from aflow_tune.writer.following.walking import Cost
from aflow_tune.writer.names import Scopes
from aflow_tune.writer.refusals import Refusals
from aflow_tune.writer.types import Bound, CheckLimits


@dataclass(frozen=True)
class WorstCase:
    """What following a graph found."""

    bound: Bound | None
    """None where a loop or a recursion has no bound."""
    spenders: Counter[tuple[int, int, str]]
    """Model calls by line, column and operator, over all paths."""
    used_prompts: frozenset[str]
    """Names under `prompts` that its code reads."""


def worst_case(
    shape: Shape,
    *,
    operators: Mapping[str, type[Operator]],
    prompts: Mapping[str, str],
    limits: CheckLimits,
    refusals: Refusals,
    scopes: Scopes,
) -> WorstCase:
    """Follow a graph that has a workflow; what is wrong on the way is put to `refusals`.

    Raises:
        TooLarge: it takes too many steps.
    """
    assert shape.tree is not None
    attributes, keys, writes_keys = _attributes_and_keys(shape.tree)
    walk = Walk(
        shape=shape,
        operators=operators,
        prompts=prompts,
        limits=limits,
        refusals=refusals,
        scopes=scopes,
        functions=dict(workflow_methods(shape)),
        attributes=set(attributes) | scopes.of_class,
        fixed=_fixed(shape, attributes),
        written_keys=keys,
        writes_keys=writes_keys,
    )
    cost = walk.run()
    bound = None if walk.unbounded else bound_of(cost, limits)
    return WorstCase(bound, walk.spenders, frozenset(walk.used_prompts))


def bound_of(cost: Cost, limits: CheckLimits) -> Bound:
    """The bound that a cost means, with the most tokens that each call may have."""
    prompt = cost.model_calls * limits.call_prompt_tokens
    completion = cost.model_calls * limits.call_completion_tokens
    prices = (limits.usd_per_prompt_token, limits.usd_per_completion_token)
    usd = None
    if cost.model_calls == 0:
        usd = 0.0
    elif prices[0] is not None and prices[1] is not None:
        usd = prompt * prices[0] + completion * prices[1]
    return Bound(cost.calls, cost.model_calls, prompt, completion, usd)


def _fixed(shape: Shape, attributes: Counter[str]) -> set[str]:
    """Attributes that are set at one place, in the constructor."""
    init = workflow_methods(shape).get("__init__")
    of_init = Counter[str]() if init is None else _attributes_and_keys(init)[0]
    return {name for name, count in attributes.items() if count == 1 == of_init[name]}


_PUTTING = ("update", "setdefault")


def _attributes_and_keys(tree: ast.AST) -> tuple[Counter[str], set[str], bool]:
    """How often what is set on self, the keys that the code puts into objects, and whether any.

    Such keys are those of `result["best"] = ...` and of `update(best=...)`.
    """
    attributes: Counter[str] = Counter()
    keys: set[str] = set()
    writes = False
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        pending += children(node)
        parts: list[ast.AST] = []
        if isinstance(node, ast.Attribute):
            writes = writes or node.attr in _PUTTING
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                attributes[node.attr] += node.value.id == "self"
        elif isinstance(node, ast.Subscript):
            parts += [node.slice] if isinstance(node.ctx, ast.Store) else []
            writes = writes or bool(parts)
        elif isinstance(node, ast.AugAssign):
            writes = writes or isinstance(node.op, ast.BitOr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _PUTTING
        ):
            parts += node.args
            keys |= {word.arg for word in node.keywords if word.arg}
        keys |= {
            item.value
            for part in parts
            for item in ast.walk(part)
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
        }
    return attributes, keys, writes
