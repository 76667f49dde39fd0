"""A graph written back as a `round_N` folder that AFlow runs: graph.py, prompt.py, __init__.py.

The code keeps its text, but for:

- the import lines that AFlow's files begin with, written anew for the folder's data set and round;
- prompt constants, whose new texts are written into prompt.py;
- instructions, which AFlow does not know: they become constants, `self.prompts` is filled from them
  where the code reads it, and a call that leaves its `instruction` to be filled in gets it;
- calls that AFlow's template of the data set does not take: our operators take what AFlow's leave
  out and leave out what they demand. An argument that AFlow demands gets the value that it has
  here, one that AFlow does not know is left out (which is noted). What would fail in AFlow wherever
  it is reached is a fault, with its line; what may fail, because it cannot be told which operator a
  call reaches, is a note.

AFlow reads prompts of operators from its own template and nowhere else: such prompts are kept
beside graph.py in prompts.json, which we read and AFlow does not, and are named in what
`save_round` returns. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import inspect
import json
import keyword
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph import inside
from aflow_tune.graph.flow import MODEL, place_of
from aflow_tune.graph.graph import PROMPTS_FILE, Graph
from aflow_tune.graph.shape import Function, parse, workflow_methods
from aflow_tune.operators.prompts import APART, MAIN, apart, own_text, with_instruction

Edit = tuple[ast.stmt | ast.expr | ast.arg, str]
"""A node of graph.py, and the text that takes its place."""

_HEADERS = {
    "aflow": """\
from typing import Literal
import workspace.{dataset}.workflows.template.operator as operator
import workspace.{dataset}.workflows.round_{round}.prompt as prompt_custom
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType
""",
    "metagpt": """\
from typing import Literal
import metagpt.ext.aflow.scripts.optimized.{dataset}.workflows.template.operator as operator
import metagpt.ext.aflow.scripts.optimized.{dataset}.workflows.round_{round}.prompt as prompt_custom
from metagpt.provider.llm_provider_registry import create_llm_instance
from metagpt.utils.cost_manager import CostManager

DatasetType = Literal["HumanEval", "MBPP", "GSM8K", "MATH", "HotpotQA", "DROP", "{dataset}"]
""",
}
_USUAL = {"operator": "operator", "prompt": "prompt_custom"}
"""What AFlow's files call these modules."""


@dataclass(frozen=True)
class SavedRound:
    """What was written."""

    folder: Path
    files: tuple[Path, ...]
    only_here: tuple[str, ...]
    """Prompts and instructions of operators, by name, that AFlow does not read."""
    notes: tuple[str, ...] = ()
    """What AFlow does differently, or may fail on, with the lines of the graph that was read."""


def save_round(
    graph: Graph,
    folder: str | Path,
    *,
    dataset: str | None = None,
    round_number: int | None = None,
) -> SavedRound:
    """Write a graph as a round of AFlow, in the form (AFlow's or MetaGPT's) that it has.

    Args:
        folder: to be made; AFlow finds it at `workspace/DATASET/workflows/round_N`.
        dataset: None for the one of that path, or else the graph's own.
        round_number: None for the one of the folder's name, or else the graph's own.

    Raises:
        BadInput: the folder holds a graph already, data set or round cannot be told, or AFlow's
            template of the data set does not take the graph's calls.
    """
    folder = Path(folder)
    place = re.fullmatch(r"round_(\d+)", folder.resolve().name)
    if place:
        round_number = int(place[1]) if round_number is None else round_number
        if folder.resolve().parent.name.startswith("workflows"):
            dataset = dataset or folder.resolve().parent.parent.name
    dataset = dataset or graph.dataset
    round_number = graph.round if round_number is None else round_number
    _refuse(folder, dataset, round_number)
    assert dataset is not None
    source = graph.sources[inside.GRAPH_FILE]
    metagpt = re.search(r"^\s*(from|import)\s+metagpt\.", source, re.M) is not None
    header = _HEADERS["metagpt" if metagpt else "aflow"].format(dataset=dataset, round=round_number)
    tree = _tree(source, inside.GRAPH_FILE)
    given = _Instructed(graph, tree)
    template = template_of(dataset, folder.resolve().parent)
    fitted = _Fitted(graph, tree, template, metagpt)
    if fitted.faults:
        raise BadInput(f"AFlow would fail on this round of {dataset}.", fitted.faults)
    notes = fitted.notes
    if template is None:
        notes.append(
            f"{dataset} has no template of AFlow's that is known here or lies at "
            f"{folder.parent / 'template'}: its calls were not checked"
        )
    changed = _outermost(tree, given.changed | fitted.changed)
    body, future = _body(source, [*given.edits, *fitted.edits, *changed])
    prompts = graph.sources.get(inside.PROMPT_FILE, "")
    texts = {
        inside.GRAPH_FILE: f"{future}{header}\n{body}",
        inside.PROMPT_FILE: _prompt_source(prompts, {**given.constants, **graph.constants}),
        "__init__.py": "",
    }
    own = {**given.prompts, **graph.operator_prompts}
    if own:
        texts[PROMPTS_FILE] = json.dumps(own, ensure_ascii=False, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    only_here = tuple(sorted({*own, *given.lost}))
    files = tuple(folder / name for name in texts)
    return SavedRound(folder, files, only_here, tuple(dict.fromkeys(notes)))


def _refuse(folder: Path, dataset: str | None, round_number: int | None) -> None:
    faults = []
    if (folder / inside.GRAPH_FILE).exists():
        found = f"{folder / inside.GRAPH_FILE} exists"
        faults.append(Fault(str(folder), "a folder without a graph", found, "name another round"))
    if dataset is None or not re.fullmatch(r"[A-Za-z_]\w*", dataset):
        fix = "write to .../DATASET/workflows/round_N, or name the data set"
        faults.append(Fault(str(folder), "the name of a data set", repr(dataset), fix))
    if round_number is None:
        fix = "name the folder round_N, or give the round"
        faults.append(Fault(str(folder), "the number of the round", "none", fix))
    if faults:
        raise BadInput("The graph cannot be written there.", faults)


# The texts of the files


def _tree(source: str, name: str) -> ast.Module:
    tree, faults = parse(source, name)
    if tree is None:
        raise BadInput(f"{name} cannot be read.", faults)
    return tree


def _body(source: str, edits: list[Edit]) -> tuple[str, str]:
    """graph.py with these edits and without what the header brings, and the `__future__` lines
    that go before it."""
    tree = _tree(source, inside.GRAPH_FILE)
    future = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future += f"{ast.unparse(node)}\n"
            edits.append((node, ""))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if ast.unparse(node) == "from typing import Literal":
                edits.append((node, ""))
            elif (names := _rebound(node)) is not None:
                edits.append((node, "; ".join(names)))
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if [getattr(target, "id", "") for target in targets] == ["DatasetType"]:
            edits.append((statement, ""))
    body = re.sub(r"\n{4,}", "\n\n\n", _edited(source, edits))
    return body.strip("\n") + "\n", future


def _rebound(node: ast.Import | ast.ImportFrom) -> list[str] | None:
    """What an import of AFlow's becomes under the header; None to keep it."""
    statements = []
    for alias in node.names:
        if isinstance(node, ast.Import):
            usual = _USUAL.get(inside.shim_of(alias.name) or "") if alias.asname else None
        else:
            module = inside.absolute(node.module or "", node.level)
            kind = inside.shim_of(module)
            inner = inside.shim_of(f"{module}.{alias.name}") if kind is None else None
            usual = _USUAL.get(inner or "")
            if kind in ("model", "dataset", "cost") and alias.asname is None:
                usual = alias.name  # the header imports it
            elif kind in _USUAL and alias.name != "*":
                usual = f"{_USUAL[kind]}.{alias.name}"
        if usual is None:
            return None
        statements.append((alias.asname or alias.name, usual))
    return [f"{name} = {usual}" for name, usual in statements if name != usual]


def _edited(source: str, edits: Sequence[Edit]) -> str:
    """The source with other texts in the places of these nodes."""
    # Columns of the parser count bytes, and only these ends of lines are ends for it.
    lines = source.encode().splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset))[::-1]:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        if not text and (before or after.partition(b"#")[0].strip()):
            text = "pass"  # it stood in a line or a block with others
        lines[first : last + 1] = [before + text.encode() + after]
    return b"".join(lines).decode()


def _outermost(node: ast.AST, changed: Collection[int]) -> Iterator[Edit]:
    """The changed nodes of a tree as texts; of those inside each other the outermost."""
    for child in ast.iter_child_nodes(node):
        # Inside of an f-string the parser of Python 3.11 gives no columns.
        whole = isinstance(child, ast.JoinedStr) and any(id(n) in changed for n in ast.walk(child))
        if id(child) in changed or whole:
            yield child, ast.unparse(child)  # type: ignore[misc]
        else:
            yield from _outermost(child, changed)


def _prompt_source(source: str, constants: Mapping[str, str]) -> str:
    """prompt.py with these constants in place of what it has, further ones at its end."""
    left = dict(constants)
    edits: list[Edit] = []
    for node in reversed(_tree(source, inside.PROMPT_FILE).body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = getattr(node.targets[0], "id", "")
            if name in left:
                edits.append((node.value, literal(left.pop(name))))
    text = _edited(source, edits)
    if left and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"\n{name} = {literal(value)}\n" for name, value in left.items())


def literal(text: str) -> str:
    """A Python literal of the text, over several lines where it has several."""
    if "\n" not in text or not text.replace("\n", "").replace("\t", "").isprintable():
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    if '"""' in text or text.endswith('"'):
        escaped = escaped.replace('"', '\\"')
    return f'"""{escaped}"""'


# Instructions


class _Instructed:
    """The changes that keep a graph's instructions without `Graph.instructions`.

    Attributes:
        constants: for prompt.py.
        edits: for graph.py, beside the calls of its tree that were changed (`changed`, by id).
        prompts: for prompts.json: whole prompts of instances whose call has no argument for an
            instruction, which we read and AFlow does not.
        lost: instances whose calls could not be told, so that their instruction may not reach them.
    """

    def __init__(self, graph: Graph, tree: ast.Module) -> None:
        self.graph, shape = graph, graph.shape
        assert shape.tree is not None
        nodes = list(ast.walk(shape.tree))
        asks = any(getattr(n, "attr", getattr(n, "value", None)) == "prompts" for n in nodes)
        by_key = [
            str(node.slice.value)
            for node in nodes
            if isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and _is_prompts(node.value)
        ]
        as_constant = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and shape.modules.get(getattr(node.value, "id", "")) == "prompt"
        }
        given = {**dict.fromkeys(by_key if asks else (), ""), **graph.told}
        taken = {*shape.constants, *graph.constants}
        names: dict[str, str] = {}
        for name in given:
            free = name if name.isidentifier() and not keyword.iskeyword(name) else "PROMPT"
            while free in {*taken, *names.values()}:
                free = f"{free}_INSTRUCTION"
            names[name] = free
        self.constants = {names[name]: text for name, text in given.items()}
        places = {name: f"{_USUAL['prompt']}.{constant}" for name, constant in names.items()}
        self.edits: list[Edit] = []
        self.changed: set[int] = set()
        takes: list[str] = []
        others: list[str] = []
        for name, operator in shape.instances.items():
            if name in graph.told and operator in graph.known:
                has = "instruction" in inspect.signature(graph.known[operator].__call__).parameters
                (takes if has else others).append(name)
        used = self._hand_over(tree, {name: places[name] for name in takes})
        used |= {*by_key, *as_constant}
        init = workflow_methods(shape).get("__init__")
        self.lost = [name for name in takes if name not in used or init is None]
        own = any(isinstance(node, ast.Assign) and _fills_prompts(node) for node in ast.walk(tree))
        if init is not None and asks and not own:
            self.edits.append(_filled(init, places, graph.sources[inside.GRAPH_FILE]))
            self.edits += _over_own(init, places, set(graph.told))
        self.prompts: dict[str, dict[str, str]] = {}
        for name in others:
            kind = graph.known[shape.instances[name]]
            main = MAIN if MAIN in kind.asks else next(iter(kind.asks), "")
            if main and graph.told[name].strip():
                text = own_text(kind.__name__, main, kind.asks[main])
                whole = with_instruction(text, graph.told[name], kind.asks[main])
                self.prompts[name] = {main: whole}

    def _hand_over(self, tree: ast.Module, places: Mapping[str, str]) -> set[str]:
        """Add `instruction=` to calls that leave it out; the instances whose calls were found."""
        reached = set()
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            handles = self.graph.flow.calls.get(place_of(call), frozenset())
            names = {name for name, _ in handles}
            if _open(call) or len(names) != 1 or not names <= places.keys():
                continue  # of several operators behind one call none can be told its own
            name = names.pop()
            reached.add(name)
            kind = self.graph.known[self.graph.shape.instances[name]]
            before = list(inspect.signature(kind.__call__).parameters)[1:].index("instruction")
            if len(call.args) <= before and all(
                word.arg != "instruction" for word in call.keywords
            ):
                text = self.graph.instructions[name]
                place = places[name] if apart(text) == text else f"{places[name]} + {APART!r}"
                call.keywords.append(ast.keyword("instruction", ast.parse(place, mode="eval").body))
                self.changed.add(id(call))
        return reached


def _over_own(init: Function, places: Mapping[str, str], told: set[str]) -> Iterator[Edit]:
    """The texts that were `told` over those that the constructor itself puts into `self.prompts`,
    and the others, which nobody gave, below them."""
    over = ", ".join(f"{name!r}: {place}" for name, place in places.items() if name in told)
    below = ", ".join(f"{name!r}: {place}" for name, place in places.items() if name not in told)
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and any(_is_prompts(target) for target in node.targets):
            parts = [below, f"**({ast.unparse(node.value)})", over]
            yield node.value, f"{{{', '.join(filter(None, parts))}}}"


def _filled(init: Function, places: Mapping[str, str], source: str) -> Edit:
    """`self.prompts` in front of the constructor's first statement."""
    first, *rest = init.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    first = rest[0] if rest and is_docstring else first
    own = init.args.args[0].arg if init.args.args else "self"
    entries = ", ".join(f"{name!r}: {place}" for name, place in places.items())
    indent = source.encode().splitlines()[first.lineno - 1][: first.col_offset].decode()
    joint = "; " if indent.strip() else f"\n{indent}"
    here = {"lineno": first.lineno, "col_offset": first.col_offset}
    nothing = ast.Pass(**here, end_lineno=first.lineno, end_col_offset=first.col_offset)
    return nothing, f"{own}.prompts = {{{entries}}}{joint}"


def _is_prompts(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "prompts"


def _fills_prompts(statement: ast.Assign) -> bool:
    """Whether it is `self.prompts = {"name": prompt_custom.name, ...}`, as saved rounds have it."""
    value = statement.value
    if len(statement.targets) != 1 or not _is_prompts(statement.targets[0]):
        return False
    return isinstance(value, ast.Dict) and all(
        isinstance(key, ast.Constant)
        and isinstance(text, ast.Attribute)
        and isinstance(text.value, ast.Name)
        and text.attr == key.value
        for key, text in zip(value.keys, value.values, strict=True)
    )


# AFlow's templates: each data set has operators of its own, and they differ: the ensemble of DROP
# takes no problem, that of MATH needs one. Where a round is written into a workspace that has the
# template, that file is read; else what AFlow's six data sets offer is known here.

_CALLS = {
    "Custom": "input, instruction",
    "AnswerGenerate": "input, mode=None",
    "CustomCodeGenerate": "problem, entry_point, instruction",
    "Programmer": "problem, analysis='None'",
    "ScEnsemble": "solutions, problem",
    "Test": "problem, solution, entry_point, test_loop=3",
}
_MATH = ("Custom", "Programmer", "ScEnsemble")
_CODE = ("Custom", "CustomCodeGenerate", "ScEnsemble", "Test")
_QA = ("Custom", "AnswerGenerate", "ScEnsemble")
_OFFERED = {
    "GSM8K": _MATH, "MATH": _MATH, "HumanEval": _CODE, "MBPP": _CODE, "HotpotQA": _QA, "DROP": _QA
}  # fmt: skip
AFLOW_NAMES = {name.casefold(): name for name in _OFFERED}
"""AFlow's spelling of its data sets, by the name in lower case: paths and imports depend on it."""


@dataclass(frozen=True)
class Template:
    """What a template offers."""

    where: str
    """For messages."""
    operators: Mapping[str, tuple[inspect.Signature, inspect.Signature]]
    """How each is built and called, without `self`."""
    entry_point: bool | None
    """Whether AFlow hands a workflow of this data set an entry point; None: not known."""


def template_of(dataset: str, workflows: Path) -> Template | None:
    """The template that a round of this data set runs with; None where it cannot be known.

    Args:
        workflows: the folder that the round's folder lies in.
    """
    file = workflows / "template" / "operator.py"
    name = AFLOW_NAMES.get(dataset.casefold(), "")
    known = _OFFERED.get(name)
    entry_point = None if known is None else known is _CODE
    try:
        tree = parse(file.read_text(encoding="utf-8-sig"), str(file))[0]
    except (OSError, UnicodeDecodeError):
        tree = None
    if tree is not None and (found := _operators(tree)):
        return Template(str(file), found, entry_point)
    if known is None:
        return None
    calls = {**_CALLS, "ScEnsemble": "solutions" if known is _QA else _CALLS["ScEnsemble"]}
    classes = "".join(
        f"class {operator}:\n    def __call__(self, {calls[operator]}): ...\n" for operator in known
    )
    return Template(f"AFlow's template of {name}", _operators(ast.parse(classes)), entry_point)


def _operators(tree: ast.Module) -> dict[str, tuple[inspect.Signature, inspect.Signature]]:
    """The operators of a template's file: its classes that can be called."""
    found = {}
    usual = _signature(ast.parse("lambda self, llm, name=None: 0", mode="eval").body.args)  # type: ignore[attr-defined]
    for node in tree.body:
        body = node.body if isinstance(node, ast.ClassDef) else []
        members = {item.name: _signature(item.args) for item in body if isinstance(item, Function)}
        if isinstance(node, ast.ClassDef) and "__call__" in members:
            found[node.name] = (members.get("__init__", usual), members["__call__"])
    return found


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a method, without self. A default is only known to be there."""
    kind = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args][1:]
    without = len(plain) - len(arguments.defaults)
    made = [
        kind(item.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < without else None)
        for i, item in enumerate(plain)
    ]
    if arguments.vararg:
        made.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    made += [
        kind(item.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        made.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(made)


# Calls

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


class _Fitted:
    """The tree of graph.py made to fit a template; None: as far as any template wants it.

    Attributes:
        changed: ids of nodes of the tree that were changed.
        edits: other texts for nodes that are no expressions.
    """

    def __init__(
        self, graph: Graph, tree: ast.Module, template: Template | None, metagpt: bool
    ) -> None:
        self.graph, self.template, self.metagpt = graph, template, metagpt
        self.changed: set[int] = set()
        self.edits: list[Edit] = []
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.whose = "MetaGPT" if metagpt else "AFlow"
        self.own = {
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and any(isinstance(item, Function) for item in node.body)
        }
        """Classes of the graph's with methods of their own: what they take is theirs to say."""
        flow = graph.flow
        if not flow.complete:
            self.note(0, "it is too large to be followed: its calls were not all checked")
        for node in ast.walk(tree):
            if isinstance(node, (ast.Attribute, ast.Name, ast.ImportFrom)):
                self.named(node)
            if isinstance(node, ast.Attribute):
                self.of_model(node)
            if isinstance(node, ast.Call):
                self.call(node)
        self.workflow(tree)
        for kind, line in flow.kinds.items():
            self.offered(ast.Pass(lineno=line), kind)
        for (instance, operator), line in sorted(flow.handed_on.items()):
            if operator and template is not None and not self.takes_all(operator):
                what = f"{instance} ({operator}) is handed to a function that is not followed"
                shown = f"{operator}{template.operators[operator][1]}"
                self.note(line, f"{what}; see that it is called as {shown}")

    def fault(self, node: ast.AST, expected: str, found: str, fix: str) -> None:
        where = f"{self.graph.label}/{inside.GRAPH_FILE}:{getattr(node, 'lineno', 0)}"
        fault = Fault(where, expected, found, fix)
        if fault not in self.faults:
            self.faults.append(fault)

    def note(self, line: int, text: str) -> None:
        self.notes.append(f"{inside.GRAPH_FILE}:{line}: {text}")

    def takes_all(self, operator: str) -> bool:
        """Whether the template's operator takes every call that ours takes."""
        assert self.template is not None
        if operator not in self.template.operators:
            return True  # a fault where it is built
        there = self.template.operators[operator][1].parameters
        ours = dict(inspect.signature(self.graph.known[operator].__call__).parameters)
        ours.pop("self")
        return list(there) == list(ours) and all(
            there[name].default is not inspect.Parameter.empty or item.default is item.empty
            for name, item in ours.items()
        )

    def named(self, node: ast.Attribute | ast.Name | ast.ImportFrom) -> None:
        """`operator.Review`, wherever it stands."""
        if isinstance(node, ast.ImportFrom):
            module = inside.absolute(node.module or "", node.level)
            for alias in node.names if inside.shim_of(module) == "operator" else ():
                self.offered(node, alias.name)
        elif isinstance(node.ctx, ast.Load):
            name = self.graph.shape.operator_class(node)
            if name is not None:
                self.offered(node, name)

    def offered(self, node: ast.AST, name: str) -> None:
        if self.template is not None and name not in (*self.template.operators, "Operator", "*"):
            names = ", ".join(self.template.operators)
            expected = f"an operator of {self.template.where}: {names}"
            fix = "use one of them, or add it to that template"
            self.fault(node, expected, f"operator.{name}", fix)

    def of_model(self, node: ast.Attribute) -> None:
        """Attributes of the model, which is another one in AFlow than in MetaGPT."""
        owner, models = ast.unparse(node.value), self.graph.flow.models
        if owner in models and node.attr not in _MODEL_OF[self.metagpt]:
            fix = f"write `{_COST[self.metagpt].format(model=owner)}` for the cost"
            if "ask" in node.attr:
                fix = f"write `await {owner}(prompt)`"
            self.fault(node, f"what the model has in {self.whose}", ast.unparse(node), fix)
        tracked = owner.removesuffix(".usage_tracker")
        if tracked != owner and tracked in models and node.attr not in _TRACKED:
            fix = f"write `{tracked}.get_usage_summary()`"
            self.fault(node, f"what the model counts in {self.whose}", ast.unparse(node), fix)

    def call(self, node: ast.Call) -> None:
        flow, classes = self.graph.flow, self.graph.shape.classes
        offered = self.template.operators if self.template is not None else {}
        built = self.graph.shape.operator_class(node.func)
        if built is not None:
            if built in offered and ast.unparse(node.func) not in self.own:
                wanted = [(built, offered[built][0], inspect.Signature())]
                self.adapt(node, wanted, certain=True)
            return
        handles = flow.calls.get(place_of(node), frozenset())
        asks = isinstance(node.func, ast.Attribute) and node.func.attr == "aask"
        if self.metagpt and (MODEL, "") in handles and not asks:
            fix = f"write `await {ast.unparse(node.func)}.aask(prompt)`"
            self.fault(node, "a call that MetaGPT's model takes", f"{ast.unparse(node):.80}", fix)
        operators = sorted({operator for _, operator in handles if operator})
        ours = {name: inspect.signature(self.graph.known[name].__call__) for name in operators}
        if ours and ours.keys() <= {"Custom", "CustomCodeGenerate"}:
            self.texts(node, ours)
        wanted = [(name, offered[name][1], ours[name]) for name in operators if name in offered]
        derived = {kind for name, kind in classes.items() if name in self.own}
        certain = not derived & {*operators} and not handles & {*flow.handed_on}
        self.adapt(node, wanted, certain=certain)

    def texts(self, node: ast.Call, ours: Mapping[str, inspect.Signature]) -> None:
        """Two of AFlow's operators put instruction and input together with `+`, so both must be
        texts."""
        names = [name for name in next(iter(ours.values())).parameters if name != "self"]
        given = [*zip(names, node.args), *((word.arg, word.value) for word in node.keywords)]  # noqa: B905
        for name, value in given:
            if name == "instruction" and isinstance(value, ast.Constant) and value.value is None:
                value.value = ""  # as it is here
                self.changed.add(id(node))
            elif place_of(value) in self.graph.flow.whole or _is_no_text(value):
                fix = "give it a text, such as one of the result's values or str(...)"
                expected = f"a text for {' and '.join(ours)}: AFlow adds instruction and input up"
                self.fault(value, expected, f"`{ast.unparse(value):.60}` as {name}", fix)

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
            dropped = _drop(changed, theirs, ours)
            left_out += [f"AFlow's {name} takes no `{what}`: left out" for what in dropped]
            changed.keywords += _missing(changed, theirs, ours)
        if not any(_misfit(changed, theirs) for _, theirs, _ in wanted):
            node.args, node.keywords = changed.args, changed.keywords
            self.changed.add(id(node))
            for what in dict.fromkeys(left_out):
                self.note(node.lineno, what)
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

    def workflow(self, tree: ast.Module) -> None:
        """What AFlow hands the workflow, and what it takes back: an answer and its cost."""
        shape = self.graph.shape
        call = workflow_methods(shape).get("__call__")
        line = call.lineno if call is not None else 0
        mine = [n for n in ast.walk(tree) if isinstance(n, Function) and n.lineno == line]
        if not mine:
            return
        method, arguments = mine[0], mine[0].args
        found = f"__call__({ast.unparse(arguments)})"
        entry_point = self.template.entry_point if self.template is not None else None
        if entry_point is False and shape.needs_entry_point:
            expected = "a workflow that takes the problem alone: this data set has no entry point"
            self.fault(method, expected, found, "write async def __call__(self, problem)")
        if entry_point and len(shape.parameters) < 2 and not arguments.vararg:
            last = [*arguments.posonlyargs, *arguments.args][-1]
            names = {item.arg for item in ast.walk(method) if isinstance(item, ast.arg)}
            if arguments.defaults or "entry_point" in names:
                fix = "write async def __call__(self, problem, entry_point)"
                expected = "a workflow that takes the problem and the entry point"
                self.fault(method, expected, found, fix)
            else:
                self.edits.append((last, f"{ast.unparse(last)}, entry_point"))
        for node in _returns(method):
            self.returned(node)

    def returned(self, node: ast.Return) -> None:
        value, answer = node.value, node.value
        with_cost = isinstance(value, ast.Tuple) and len(value.elts) == 2
        if isinstance(value, ast.Tuple) and with_cost:
            answer = value.elts[0]
        if value is None or answer is None or isinstance(answer, ast.Tuple):
            return  # it fails here as well
        whole = place_of(answer) in self.graph.flow.whole
        if whole:
            fix = f"return its text, as in `{ast.unparse(answer)}[...]`"
            self.fault(node, "the text of the answer", ast.unparse(node), fix)
        elif _is_no_text(answer) and not isinstance(answer, ast.Constant):
            found = ast.unparse(node)[:80]
            self.fault(node, "the text of the answer", found, "return one text")
        if with_cost:
            return
        if isinstance(value, (ast.Name, ast.Call, ast.Await, ast.Attribute, ast.IfExp)):
            if not whole:
                what = f"`{ast.unparse(node):.80}` must give two values, the answer and its cost"
                self.note(node.lineno, f"AFlow takes an answer and a cost; {what}")
            return
        models = sorted(name for name in self.graph.flow.models if name.startswith("self."))
        cost = _COST[self.metagpt].format(model=models[0]) if models else "0"
        node.value = ast.Tuple([value, ast.parse(cost, mode="eval").body], ast.Load())
        self.changed.add(id(node))


def _open(node: ast.Call) -> bool:
    """Whether some of its arguments cannot be seen."""
    starred = any(isinstance(item, ast.Starred) for item in node.args)
    return starred or any(word.arg is None for word in node.keywords)


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
    while len(there) < len(node.args) <= len(names) and _is_still(node.args[-1]):
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
