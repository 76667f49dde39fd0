"""A graph's instructions as AFlow can hold them: constants of prompt.py, and the code to use them.

AFlow knows no instructions. Their texts become constants under their own names (under
`NAME_INSTRUCTION` where prompt.py has that name), `self.prompts` is filled from them as the
first thing that the constructor does where the code reads it, and a call that leaves its
`instruction` to be filled in gets it as an argument. What is left are operators whose call has no
such argument: in front of their own prompt AFlow puts nothing. Those are named, for whoever
writes the folder.

Only texts are made here; `save.py` writes them.
"""

from __future__ import annotations

import ast
import inspect
import keyword
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from aflow_tune.graph import inside
from aflow_tune.graph.flow import place_of
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.shape import Function, Shape, workflow_methods
from aflow_tune.operators.prompts import APART, MAIN, apart, own_text, with_instruction

Edit = tuple[ast.stmt | ast.expr | ast.arg, str]
"""A node of graph.py, and the text that takes its place."""


@dataclass
class Instructed:
    """What the instructions of a graph become."""

    constants: dict[str, str] = field(default_factory=dict)
    """For prompt.py."""
    edits: list[Edit] = field(default_factory=list)
    """For graph.py, beside the calls that were changed."""
    changed: set[int] = field(default_factory=set)
    """Ids of the tree's calls that were changed."""
    prompts: dict[str, dict[str, str]] = field(default_factory=dict)
    """For prompts.json: whole prompts of instances, which we read and AFlow does not."""
    lost: list[str] = field(default_factory=list)
    """Instances whose calls could not be told, so that their instruction may not reach them."""


def instructed(graph: Graph, tree: ast.Module, prompts_module: str) -> Instructed:
    """The changes that keep a graph's instructions without `Graph.instructions`.

    Args:
        tree: of graph.py, whose calls are changed.
        prompts_module: what graph.py calls the module of its prompts.
    """
    made = Instructed()
    read = dict.fromkeys(_read_by_key(graph.shape), "") if _reads_prompts(graph.shape) else {}
    given = {**read, **graph.told}
    taken = {*graph.shape.constants, *graph.constants}
    names: dict[str, str] = {}
    for name in given:
        free = name if name.isidentifier() and not keyword.iskeyword(name) else "PROMPT"
        while free in {*taken, *names.values()}:
            free = f"{free}_INSTRUCTION"
        names[name] = free
    made.constants = {names[name]: text for name, text in given.items()}
    places = {name: f"{prompts_module}.{constant}" for name, constant in names.items()}
    takes, others = _by_argument(graph)
    reached, made.changed = _handed_over(graph, tree, {name: places[name] for name in takes})
    init = workflow_methods(graph.shape).get("__init__")
    own = any(isinstance(node, ast.Assign) and fills_prompts(node) for node in ast.walk(tree))
    if init is not None and _reads_prompts(graph.shape) and not own:
        made.edits.insert(0, _filled(init, places, graph.sources[inside.GRAPH_FILE]))
        made.edits += _over_own(init, places, set(graph.told))
    used = reached | _named(graph.shape)
    made.lost = [name for name in takes if name not in used or init is None]
    for name in others:
        kind = graph.known[graph.shape.instances[name]]
        main = MAIN if MAIN in kind.asks else next(iter(kind.asks), "")
        if main and graph.told[name].strip():
            text = own_text(kind.__name__, main, kind.asks[main])
            whole = with_instruction(text, graph.told[name], kind.asks[main])
            made.prompts[name] = {main: whole}
    return made


def _by_argument(graph: Graph) -> tuple[list[str], list[str]]:
    """Instances with an instruction: whose call has an argument for it, and the others."""
    takes: list[str] = []
    others: list[str] = []
    for name, operator in graph.shape.instances.items():
        if name in graph.told and operator in graph.known:
            parameters = inspect.signature(graph.known[operator].__call__).parameters
            (takes if "instruction" in parameters else others).append(name)
    return takes, others


def _over_own(init: Function, places: Mapping[str, str], told: set[str]) -> Iterator[Edit]:
    """The texts that were `told` over those that the constructor itself puts into `self.prompts`,
    and the others, which nobody gave, below them."""
    over = ", ".join(f"{name!r}: {place}" for name, place in places.items() if name in told)
    below = ", ".join(f"{name!r}: {place}" for name, place in places.items() if name not in told)
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "prompts"
            for target in node.targets
        ):
            parts = [below, f"**({ast.unparse(node.value)})", over]
            yield node.value, f"{{{', '.join(filter(None, parts))}}}"


def _filled(init: Function, places: Mapping[str, str], source: str) -> Edit:
    """`self.prompts` in front of the constructor's first statement."""
    body = init.body
    first = body[1] if len(body) > 1 and _is_docstring(body[0]) else body[0]
    own = init.args.args[0].arg if init.args.args else "self"
    entries = ", ".join(f"{name!r}: {place}" for name, place in places.items())
    indent = source.encode().splitlines()[first.lineno - 1][: first.col_offset].decode()
    joint = "; " if indent.strip() else f"\n{indent}"
    here = {"lineno": first.lineno, "col_offset": first.col_offset}
    nothing = ast.Pass(**here, end_lineno=first.lineno, end_col_offset=first.col_offset)
    return nothing, f"{own}.prompts = {{{entries}}}{joint}"


def fills_prompts(statement: ast.Assign) -> bool:
    """Whether it is `self.prompts = {"name": prompt_custom.name, ...}`, as saved rounds have it."""
    target, value = statement.targets[0], statement.value
    return (
        len(statement.targets) == 1
        and isinstance(target, ast.Attribute)
        and target.attr == "prompts"
        and isinstance(value, ast.Dict)
        and all(
            isinstance(key, ast.Constant)
            and isinstance(text, ast.Attribute)
            and isinstance(text.value, ast.Name)
            and text.attr == key.value
            for key, text in zip(value.keys, value.values, strict=True)
        )
    )


def _reads_prompts(shape: Shape) -> bool:
    """Whether the code asks for `prompts`, as an attribute or through `getattr`."""
    assert shape.tree is not None
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "prompts")
        or (isinstance(node, ast.Constant) and node.value == "prompts")
        for node in ast.walk(shape.tree)
    )


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _read_by_key(shape: Shape) -> list[str]:
    """Names that the code reads as `self.prompts["name"]`."""
    assert shape.tree is not None
    return [
        str(node.slice.value)
        for node in ast.walk(shape.tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "prompts"
    ]


def _named(shape: Shape) -> set[str]:
    """Names that the code reads itself, as `self.prompts["name"]` or `prompt_custom.name`."""
    assert shape.tree is not None
    return {
        node.attr
        for node in ast.walk(shape.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and shape.modules.get(node.value.id) == "prompt"
    } | {*_read_by_key(shape)}


def _handed_over(
    graph: Graph, tree: ast.Module, places: Mapping[str, str]
) -> tuple[set[str], set[int]]:
    """Add `instruction=` to calls that leave it out; whose calls were found, and which changed."""
    reached, changed = set(), set()
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        handles = graph.flow.calls.get(place_of(call), frozenset())
        open_ended = any(isinstance(item, ast.Starred) for item in call.args) or any(
            word.arg is None for word in call.keywords
        )
        names = {name for name, _ in handles}
        if open_ended or len(names) != 1 or not names <= places.keys():
            continue  # of several operators behind one call none can be told its own
        name = names.pop()
        kind = graph.known[graph.shape.instances[name]]
        before = list(inspect.signature(kind.__call__).parameters)[1:].index("instruction")
        reached.add(name)
        given = len(call.args) > before or any(item.arg == "instruction" for item in call.keywords)
        if not given:
            text = graph.instructions[name]
            place = places[name] if apart(text) == text else f"{places[name]} + {APART!r}"
            call.keywords.append(ast.keyword("instruction", ast.parse(place, mode="eval").body))
            changed.add(id(call))
    return reached, changed


def outermost(node: ast.AST, changed: Collection[int]) -> Iterator[Edit]:
    """The changed nodes of a tree as texts; of those inside each other the outermost."""
    for child in ast.iter_child_nodes(node):
        # Inside of an f-string the parser of Python 3.11 gives no columns.
        if id(child) in changed or (
            isinstance(child, ast.JoinedStr)
            and any(id(part) in changed for part in ast.walk(child))
        ):
            yield child, ast.unparse(child)  # type: ignore[misc]
        else:
            yield from outermost(child, changed)
