"""The calls of a graph, made to fit AFlow's template of a data set, or refused.

Our operators take what AFlow's leave out and leave out what they demand. What can be put right
without changing what the round does is: an argument that AFlow demands gets the value that it has
here, one that AFlow does not know is left out (which is noted). What would fail in AFlow wherever
it is reached is a fault, with its line; what may fail, because it cannot be told which operator a
call reaches, is a note.

Only a syntax tree is changed here; `save.py` writes it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aflow_tune.errors import Fault
from aflow_tune.graph import inside
from aflow_tune.graph.aflow_template import Template
from aflow_tune.graph.flow import MODEL, place_of
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.shape import Function, workflow_methods

_MODEL_OF = {
    False: frozenset({"aclient", "call_with_format", "config", "get_usage_summary", "sys_msg",
                      "usage_tracker"}),
    True: frozenset({"aask", "config", "cost_manager"}),
}  # fmt: skip
"""What the model of AFlow (False) and that of MetaGPT (True) have of what ours offers."""
_TRACKED = frozenset({"get_summary", "total_cost", "usage_history"})
"""Of `usage_tracker`."""
_COST = {
    False: '{model}.get_usage_summary()["total_cost"]',
    True: "{model}.cost_manager.total_cost",
}


@dataclass
class Fitted:
    """What came of it."""

    changed: set[int] = field(default_factory=set)
    """Ids of nodes of the tree that were changed."""
    edits: list[tuple[ast.arg, str]] = field(default_factory=list)
    """Other texts for nodes that are no expressions."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def fit(graph: Graph, tree: ast.Module, template: Template | None, metagpt: bool) -> Fitted:
    """Make the tree of graph.py fit; None for a template: as far as any of them wants it."""
    work = _Fit(graph, tree, template, metagpt)
    work.all()
    return work.made


class _Fit:
    def __init__(
        self, graph: Graph, tree: ast.Module, template: Template | None, metagpt: bool
    ) -> None:
        self.graph, self.tree, self.template, self.metagpt = graph, tree, template, metagpt
        self.made = Fitted()
        self.own = {
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and any(isinstance(item, Function) for item in node.body)
        }
        """Classes of the graph's with methods of their own: what they take is theirs to say."""

    def all(self) -> None:
        flow = self.graph.flow
        if not flow.complete:
            self.note(0, "it is too large to be followed: its calls were not all checked")
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name, ast.ImportFrom)):
                self.named(node)
            if isinstance(node, ast.Attribute):
                self.of_model(node)
            if isinstance(node, ast.Call):
                self.call(node)
        self.workflow()
        for kind, line in flow.kinds.items():
            self.offered(ast.Pass(lineno=line), kind)
        if self.template is not None:
            for (instance, operator), line in sorted(flow.handed_on.items()):
                if operator and not self.same(operator):
                    what = f"{instance} ({operator}) is handed to a function that is not followed"
                    self.note(line, f"{what}; see that it is called as {self.shown(operator)}")

    def same(self, operator: str) -> bool:
        """Whether the template's operator takes every call that ours takes."""
        assert self.template is not None
        theirs = self.template.operators.get(operator)
        ours = inspect.signature(self.graph.known[operator].__call__).parameters
        if theirs is None:
            return True  # a fault where it is built
        there = theirs.called.parameters
        return list(there) == list(ours)[1:] and all(
            there[name].default is not inspect.Parameter.empty or item.default is item.empty
            for name, item in list(ours.items())[1:]
        )

    # What it names

    def named(self, node: ast.Attribute | ast.Name | ast.ImportFrom) -> None:
        """`operator.Review`, wherever it stands."""
        if isinstance(node, ast.ImportFrom):
            module = inside.absolute(node.module or "", node.level)
            found = [a.name for a in node.names] if inside.shim_of(module) == "operator" else []
        else:
            name = self.graph.shape.operator_class(node)
            found = [] if name is None or not isinstance(node.ctx, ast.Load) else [name]
        for name in found:
            self.offered(node, name)

    def offered(self, node: ast.AST, name: str) -> None:
        if self.template is None or name in (*self.template.operators, "Operator", "*"):
            return
        expected = f"an operator of {self.template.where}: {', '.join(self.template.operators)}"
        cure = "use one of them, or add it to that template"
        self.fault(node, expected, f"operator.{name}", cure)

    def of_model(self, node: ast.Attribute) -> None:
        """Attributes of the model, which is another one in AFlow than in MetaGPT."""
        owner = ast.unparse(node.value)
        whose = "MetaGPT" if self.metagpt else "AFlow"
        if owner in self.graph.flow.models and node.attr not in _MODEL_OF[self.metagpt]:
            cost = _COST[self.metagpt].format(model=owner)
            cure = f"write `{cost}` for the cost"
            if "ask" in node.attr:
                cure = f"write `await {owner}(prompt)`"
            self.fault(node, f"what the model has in {whose}", ast.unparse(node), cure)
        tracked = owner.removesuffix(".usage_tracker")
        if tracked != owner and tracked in self.graph.flow.models and node.attr not in _TRACKED:
            cure = f"write `{tracked}.get_usage_summary()`"
            self.fault(node, f"what the model counts in {whose}", ast.unparse(node), cure)

    # Calls

    def call(self, node: ast.Call) -> None:
        flow, classes = self.graph.flow, self.graph.shape.classes
        built = self.graph.shape.operator_class(node.func)
        if built is not None:
            if self.template is not None and ast.unparse(node.func) not in self.own:
                theirs = self.template.operators.get(built)
                wanted = [] if theirs is None else [(built, theirs.built, inspect.Signature())]
                self.adapt(node, wanted, certain=True)
            return
        handles = flow.calls.get(place_of(node), frozenset())
        asks = isinstance(node.func, ast.Attribute) and node.func.attr == "aask"
        if self.metagpt and (MODEL, "") in handles and not asks:
            cure = f"write `await {ast.unparse(node.func)}.aask(prompt)`"
            self.fault(node, "a call that MetaGPT's model takes", f"{ast.unparse(node):.80}", cure)
        operators = sorted({operator for _, operator in handles if operator})
        if not operators:
            return
        ours = {name: inspect.signature(self.graph.known[name].__call__) for name in operators}
        self.texts(node, ours)
        if self.template is not None:
            offered = self.template.operators
            wanted = [(n, offered[n].called, ours[n]) for n in operators if n in offered]
            derived = {kind for name, kind in classes.items() if name in self.own}
            certain = not derived & {*operators} and not handles & {*flow.handed_on}
            self.adapt(node, wanted, certain=certain)

    def texts(self, node: ast.Call, ours: Mapping[str, inspect.Signature]) -> None:
        """Two of AFlow's operators put instruction and input together with `+`, so both must be
        texts."""
        if not ours.keys() <= {"Custom", "CustomCodeGenerate"}:
            return
        names = [name for name in next(iter(ours.values())).parameters if name != "self"]
        for number, value in enumerate([*node.args, *(word.value for word in node.keywords)]):
            word = node.keywords[number - len(node.args)] if number >= len(node.args) else None
            name = word.arg if word is not None else dict(enumerate(names)).get(number)
            if name == "instruction" and isinstance(value, ast.Constant) and value.value is None:
                value.value = ""  # as it is here
                self.made.changed.add(id(node))
            elif place_of(value) in self.graph.flow.whole or _is_no_text(value):
                cure = "give it a text, such as one of the result's values or str(...)"
                expected = f"a text for {' and '.join(ours)}: AFlow adds instruction and input up"
                self.fault(value, expected, f"`{ast.unparse(value):.60}` as {name}", cure)

    def adapt(
        self,
        node: ast.Call,
        wanted: Sequence[tuple[str, inspect.Signature, inspect.Signature]],
        *,
        certain: bool,
    ) -> None:
        """Change a call so that each operator that it may reach takes it; else say which not.

        Args:
            wanted: name, AFlow's signature and ours.
            certain: whether it reaches one of these, with no other arguments.
        """
        wrong = [(name, theirs) for name, theirs, _ in wanted if _misfit(node, theirs)]
        if not wrong:
            return
        changed = ast.Call(node.func, list(node.args), list(node.keywords))
        left_out: list[str] = []
        for name, theirs, ours in () if _open(node) else wanted:
            left_out += [
                f"AFlow's {name} takes no `{what}`" for what in _drop(changed, theirs, ours)
            ]
            changed.keywords += _missing(changed, theirs, ours)
        if not any(_misfit(changed, theirs) for _, theirs, _ in wanted):
            node.args, node.keywords = changed.args, changed.keywords
            self.made.changed.add(id(node))
            for what in dict.fromkeys(left_out):
                self.note(node.lineno, f"{what}: left out")
            return
        assert self.template is not None
        certain = certain and len(wrong) == len(wanted) and not _open(node)
        for name, theirs in wrong:
            found = f"`{ast.unparse(node):.80}`: {_misfit(node, theirs)}"
            if certain:
                expected = f"{name}{theirs}, as {self.template.where} has it"
                self.fault(node, expected, found, "give it these arguments")
            else:
                self.note(node.lineno, f"AFlow has {name}{theirs}; this may not fit: {found}")

    def shown(self, operator: str) -> str:
        assert self.template is not None
        return f"{operator}{self.template.operators[operator].called}"

    # The workflow

    def workflow(self) -> None:
        """What AFlow hands the workflow, and what it takes back: an answer and its cost."""
        call = workflow_methods(self.graph.shape).get("__call__")
        mine = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, Function) and call is not None and node.lineno == call.lineno
        ]
        if not mine:
            return
        entry_point = self.template.entry_point if self.template is not None else None
        shape = self.graph.shape
        arguments = mine[0].args
        if entry_point is False and shape.needs_entry_point:
            cure = "write async def __call__(self, problem)"
            expected = "a workflow that takes the problem alone: this data set has no entry point"
            self.fault(mine[0], expected, f"__call__({ast.unparse(arguments)})", cure)
        if entry_point and len(shape.parameters) < 2 and not arguments.vararg:
            last = [*arguments.posonlyargs, *arguments.args][-1]
            if arguments.defaults or any(
                item.arg == "entry_point" for item in ast.walk(mine[0]) if isinstance(item, ast.arg)
            ):
                cure = "write async def __call__(self, problem, entry_point)"
                expected = "a workflow that takes the problem and the entry point"
                self.fault(mine[0], expected, f"__call__({ast.unparse(arguments)})", cure)
            else:
                self.made.edits.append((last, f"{ast.unparse(last)}, entry_point"))
        for node in _returns(mine[0]):
            self.returned(node)

    def returned(self, node: ast.Return) -> None:
        value = node.value
        both = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == 2 else None
        answer = both[0] if both else value
        if answer is None or isinstance(answer, ast.Tuple):
            return  # it fails here as well
        whole = place_of(answer) in self.graph.flow.whole
        if whole:
            cure = f"return its text, as in `{ast.unparse(answer)}[...]`"
            self.fault(node, "the text of the answer", ast.unparse(node), cure)
        elif _is_no_text(answer) and not isinstance(answer, ast.Constant):
            found = ast.unparse(node)[:80]
            self.fault(node, "the text of the answer", found, "return one text")
        if both is not None:
            return
        if isinstance(value, (ast.Name, ast.Call, ast.Await, ast.Attribute, ast.IfExp)):
            if not whole:
                what = f"`{ast.unparse(node):.80}` must give two values, the answer and its cost"
                self.note(node.lineno, f"AFlow takes an answer and a cost; {what}")
            return
        models = sorted(name for name in self.graph.flow.models if name.startswith("self."))
        cost = _COST[self.metagpt].format(model=models[0]) if models else "0"
        assert value is not None
        node.value = ast.Tuple([value, ast.parse(cost, mode="eval").body], ast.Load())
        self.made.changed.add(id(node))

    def fault(self, node: ast.AST, expected: str, found: str, cure: str) -> None:
        where = f"{self.graph.label}/{inside.GRAPH_FILE}:{getattr(node, 'lineno', 0)}"
        fault = Fault(where, expected, found, cure)
        if fault not in self.made.faults:
            self.made.faults.append(fault)

    def note(self, line: int, text: str) -> None:
        self.made.notes.append(f"{inside.GRAPH_FILE}:{line}: {text}")


def _open(node: ast.Call) -> bool:
    """Whether some of its arguments cannot be seen."""
    return any(isinstance(item, ast.Starred) for item in node.args) or any(
        word.arg is None for word in node.keywords
    )


def _misfit(node: ast.Call, signature: inspect.Signature) -> str:
    """Why a signature does not take a call; empty where it does."""
    if _open(node):
        return "its arguments cannot be seen"
    try:
        signature.bind(*node.args, **{str(word.arg): word for word in node.keywords})
    except TypeError as error:
        return str(error)
    return ""


def _drop(node: ast.Call, theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    """Take out what AFlow's operator does not take and what does nothing by being evaluated."""
    names, there = list(ours.parameters)[1:], theirs.parameters
    if any(item.kind is item.VAR_KEYWORD for item in there.values()):
        return []
    dropped = []
    while len(node.args) > len(there) and len(node.args) <= len(names) and _is_still(node.args[-1]):
        dropped.append(names[len(node.args) - 1])
        node.args.pop()
    for word in list(node.keywords):
        if word.arg not in there and _is_still(word.value):
            node.keywords.remove(word)
            dropped.append(str(word.arg))
    return dropped


def _missing(
    node: ast.Call, theirs: inspect.Signature, ours: inspect.Signature
) -> list[ast.keyword]:
    """The arguments that AFlow's operator demands, with the values that they have here."""
    given = {*list(theirs.parameters)[: len(node.args)], *(word.arg for word in node.keywords)}
    return [
        ast.keyword(name, ast.Constant(ours.parameters[name].default))
        for name, item in theirs.parameters.items()
        if name not in given
        and item.default is item.empty
        and name in ours.parameters
        and isinstance(ours.parameters[name].default, (str, int, float, bool))
    ]


def _is_no_text(node: ast.expr) -> bool:
    """Whether an expression is surely something else than a text."""
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str)
    kinds = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.DictComp, ast.ListComp, ast.SetComp)
    return isinstance(node, kinds)


def _is_still(node: ast.expr) -> bool:
    """Whether nothing happens where an expression is evaluated."""
    doing = (ast.Call, ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    return not any(isinstance(item, doing) for item in ast.walk(node))


def _returns(function: ast.AST) -> list[ast.Return]:
    """The returns of a function itself, not of those inside it."""
    found: list[ast.Return] = []
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            found.append(node)
        if not isinstance(node, (Function, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    return sorted(found, key=lambda item: item.lineno)
