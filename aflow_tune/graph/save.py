"""A graph written back as a `round_N` folder that AFlow runs: graph.py, prompt.py, __init__.py.

The code keeps its text, but for the import lines (written anew for the folder's data set and
round), the texts of prompts (written into prompt.py), instructions, which AFlow does not know (they
become constants that the code hands over), and calls that AFlow's template of the data set does not
take: an argument that AFlow demands gets the value that it has here, one that AFlow does not know
is left out, which is noted. What would fail in AFlow wherever it is reached is a fault, with its
line; what may fail, because it cannot be told which operator a call reaches, is a note.

AFlow reads prompts of operators from its own template and nowhere else: such prompts are kept
beside graph.py in prompts.json, which we read and AFlow does not, and are named in what
`save_round` returns. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import inspect
import json
import keyword
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import write_whole
from aflow_tune.graph import inside
from aflow_tune.graph.flow import MODEL, place_of
from aflow_tune.graph.graph import PROMPTS_FILE, Graph
from aflow_tune.graph.shape import Edit, Function, edited, parse, workflow_methods
from aflow_tune.operators.prompts import APART, MAIN, apart, own_text, with_instruction

_HEADERS = {
    "AFlow": """\
from typing import Literal
import workspace.{dataset}.workflows.template.operator as operator
import workspace.{dataset}.workflows.round_{round}.prompt as prompt_custom
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType
""",
    "MetaGPT": """\
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
    if faults or dataset is None:
        raise BadInput("The graph cannot be written there.", faults)

    template = template_of(dataset, folder.resolve().parent)
    fitted = _Fitted(graph, template)
    if fitted.faults:
        raise BadInput(f"AFlow would fail on this round of {dataset}.", fitted.faults)
    if template is None:
        fitted.notes.append(
            f"{dataset} has no template of AFlow's that is known here or lies at "
            f"{folder.parent / 'template'}: its calls were not checked"
        )
    body, future = _body(fitted)
    header = _HEADERS[fitted.whose].format(dataset=dataset, round=round_number)
    prompts = graph.sources.get(inside.PROMPT_FILE, "")
    texts = {
        inside.GRAPH_FILE: f"{future}{header}\n{body}",
        inside.PROMPT_FILE: _prompt_source(prompts, {**fitted.constants, **graph.constants}),
        "__init__.py": "",
    }
    own = {**fitted.prompts, **graph.operator_prompts}
    if own:
        texts[PROMPTS_FILE] = json.dumps(own, ensure_ascii=False, indent=2) + "\n"
    for name, text in texts.items():
        write_whole(folder / name, text)
    only_here = tuple(sorted({*own, *fitted.lost}))
    files = tuple(folder / name for name in texts)
    return SavedRound(folder, files, only_here, tuple(dict.fromkeys(fitted.notes)))


# The texts of the files


def _tree(source: str, name: str) -> ast.Module:
    tree, faults = parse(source, name)
    if tree is None:
        raise BadInput(f"{name} cannot be read.", faults)
    return tree


def _body(fitted: _Fitted) -> tuple[str, str]:
    """graph.py with what was fitted and without what the header brings, and the `__future__` lines
    that go before it."""
    tree = _tree(fitted.source, inside.GRAPH_FILE)
    future, edits = "", [*fitted.edits, *_outermost(fitted.tree, fitted.changed)]
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
    body = re.sub(r"\n{4,}", "\n\n\n", edited(fitted.source, edits))
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


def _outermost(node: ast.AST, changed: Collection[int]) -> Iterator[Edit]:
    """The changed nodes of a tree as texts; of those inside each other the outermost."""
    for child in ast.iter_child_nodes(node):
        # Inside of an f-string the parser of Python 3.11 gives no columns.
        whole = isinstance(child, ast.JoinedStr) and any(id(n) in changed for n in ast.walk(child))
        if id(child) in changed or whole:
            yield child, ast.unparse(child)
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
    text = edited(source, edits)
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
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [kind.empty] * (len(plain) - len(arguments.defaults)) + [None] * len(plain)
    made = [
        kind(item.arg, kind.POSITIONAL_OR_KEYWORD, default=default)
        for item, default in zip(plain, defaults)  # noqa: B905
    ][1:]
    if arguments.vararg:
        made.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    made += [
        kind(item.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        made.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(made)


# The code

_MODEL_OF = {
    "AFlow": frozenset({"aclient", "call_with_format", "config", "get_usage_summary", "sys_msg",
                        "usage_tracker"}),
    "MetaGPT": frozenset({"aask", "config", "cost_manager"}),
}  # fmt: skip
"""What the models of AFlow and of MetaGPT have of what ours offers."""
_TRACKED = frozenset({"get_summary", "total_cost", "usage_history"})  # of `usage_tracker`
_COST = {
    "AFlow": '{model}.get_usage_summary()["total_cost"]',
    "MetaGPT": "{model}.cost_manager.total_cost",
}


class _Fitted:
    """The tree of graph.py, made to hand over its instructions and to fit a template.

    Attributes:
        constants: instructions, for prompt.py.
        prompts: for prompts.json: whole prompts of instances whose call has no argument for an
            instruction, which we read and AFlow does not.
        lost: instances whose calls could not be told, so that their instruction may not reach them.
        changed: ids of nodes of the tree that were changed.
        edits: other texts for nodes that are no expressions.
    """

    def __init__(self, graph: Graph, template: Template | None) -> None:
        self.graph, self.template = graph, template
        self.source = graph.sources[inside.GRAPH_FILE]
        metagpt = re.search(r"^\s*(from|import)\s+metagpt\.", self.source, re.M) is not None
        self.whose = "MetaGPT" if metagpt else "AFlow"
        self.tree = _tree(self.source, inside.GRAPH_FILE)
        self.changed: set[int] = set()
        self.edits: list[Edit] = []
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self._instruct()
        self.own = {
            node.name
            for node in self.tree.body
            if isinstance(node, ast.ClassDef)
            and any(isinstance(item, Function) for item in node.body)
        }
        """Classes of the graph's with methods of their own: what they take is theirs to say."""
        flow = graph.flow
        if not flow.complete:
            self._note(0, "it is too large to be followed: its calls were not all checked")
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
                self._offered(node.lineno, graph.shape.operator_class(node))
            if isinstance(node, ast.ImportFrom):
                module = inside.absolute(node.module or "", node.level)
                for alias in node.names if inside.shim_of(module) == "operator" else ():
                    self._offered(node.lineno, alias.name)
            if isinstance(node, ast.Attribute):
                self._of_model(node)
            if isinstance(node, ast.Call):
                self._call(node)
        self._workflow()
        for kind, line in flow.kinds.items():
            self._offered(line, kind)
        for (instance, operator), line in sorted(flow.handed_on.items()):
            if template is not None and operator in template.operators:
                what = f"{instance} ({operator}) is handed to a function that is not followed"
                shown = f"{operator}{template.operators[operator][1]}"
                self._note(line, f"{what}; see that it is called as {shown}")

    def _fault(self, line: int, expected: str, found: str, fix: str) -> None:
        fault = Fault(f"{self.graph.label}/{inside.GRAPH_FILE}:{line}", expected, found, fix)
        if fault not in self.faults:
            self.faults.append(fault)

    def _note(self, line: int, text: str) -> None:
        self.notes.append(f"{inside.GRAPH_FILE}:{line}: {text}")

    def _ours(self, operator: str) -> inspect.Signature:
        return inspect.signature(self.graph.known[operator].__call__)

    # Instructions become constants of prompt.py; `self.prompts` is filled from them where the code
    # reads it, and a call that leaves its `instruction` to be filled in gets it.

    def _instruct(self) -> None:
        graph, shape = self.graph, self.graph.shape
        nodes = list(ast.walk(shape.tree or ast.Module([], [])))
        asks = any(getattr(n, "attr", getattr(n, "value", None)) == "prompts" for n in nodes)
        by_key = [
            str(node.slice.value)
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
            if _is_prompts(node.value)
        ]
        read = {
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
        told = [
            (name, kind, "instruction" in self._ours(kind).parameters)
            for name, kind in shape.instances.items()
            if name in graph.told and kind in graph.known
        ]
        takes = [name for name, _, has in told if has]
        used = {*by_key, *read, *self._hand_over({name: places[name] for name in takes})}
        init = workflow_methods(shape).get("__init__")
        self.lost = [name for name in takes if name not in used or init is None]
        if init is not None and asks:
            self._fill(init, places)
        self.prompts: dict[str, dict[str, str]] = {}
        for name, operator, has in told:
            prompts = graph.known[operator].asks
            main = MAIN if MAIN in prompts else next(iter(prompts), "")
            if not has and main and graph.told[name].strip():
                text = own_text(graph.known[operator].__name__, main, prompts[main])
                whole = with_instruction(text, graph.told[name], prompts[main])
                self.prompts[name] = {main: whole}

    def _hand_over(self, places: Mapping[str, str]) -> set[str]:
        """Add `instruction=` to calls that leave it out; the instances whose calls were found."""
        reached = set()
        for call in [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]:
            names = {name for name, _ in self.graph.flow.calls.get(place_of(call), ())}
            if _open(call) or len(names) != 1 or not names <= places.keys():
                continue  # of several operators behind one call none can be told its own
            name = names.pop()
            reached.add(name)
            parameters = list(self._ours(self.graph.shape.instances[name]).parameters)
            by_name = {word.arg for word in call.keywords}
            if len(call.args) < parameters.index("instruction") and "instruction" not in by_name:
                text = self.graph.told[name]
                place = places[name] if apart(text) == text else f"{places[name]} + {APART!r}"
                call.keywords.append(ast.keyword("instruction", ast.parse(place, mode="eval").body))
                self.changed.add(id(call))
        return reached

    def _fill(self, init: Function, places: Mapping[str, str]) -> None:
        """`self.prompts` in front of the constructor's first statement. The texts that were told go
        over those that the constructor itself puts there, and the others, which nobody gave, below
        them."""
        assigned = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and any(map(_is_prompts, node.targets))
        ]
        saved = re.compile(r"\{('(\w+)': \w+\.\2(, (?!\})|(?=\})))*\}")  # as saved rounds have it
        if any(saved.fullmatch(ast.unparse(node.value)) for node in assigned):
            return
        first, *rest = init.body
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        first = rest[0] if rest and is_docstring else first
        own = init.args.args[0].arg if init.args.args else "self"
        entries = [f"{name!r}: {place}" for name, place in places.items()]
        indent = self.source.encode().splitlines()[first.lineno - 1][: first.col_offset].decode()
        joint = "; " if indent.strip() else f"\n{indent}"
        here = {"lineno": first.lineno, "col_offset": first.col_offset}
        nothing = ast.Pass(**here, end_lineno=first.lineno, end_col_offset=first.col_offset)
        self.edits.append((nothing, f"{own}.prompts = {{{', '.join(entries)}}}{joint}"))
        told = [name in self.graph.told for name in places]
        below = [entry for entry, over in zip(entries, told, strict=True) if not over]
        above = [entry for entry, over in zip(entries, told, strict=True) if over]
        for node in ast.walk(init):
            if isinstance(node, ast.Assign) and any(map(_is_prompts, node.targets)):
                parts = [*below, f"**({ast.unparse(node.value)})", *above]
                self.edits.append((node.value, f"{{{', '.join(parts)}}}"))

    # What AFlow's template and its model take

    def _offered(self, line: int, name: str | None) -> None:
        if self.template is not None and name not in (
            *self.template.operators, None, "Operator", "*"
        ):  # fmt: skip
            names = ", ".join(self.template.operators)
            expected = f"an operator of {self.template.where}: {names}"
            fix = "use one of them, or add it to that template"
            self._fault(line, expected, f"operator.{name}", fix)

    def _of_model(self, node: ast.Attribute) -> None:
        """Attributes of the model, which is another one in AFlow than in MetaGPT."""
        owner, models = ast.unparse(node.value), self.graph.flow.models
        if owner in models and node.attr not in _MODEL_OF[self.whose]:
            fix = f"write `{_COST[self.whose].format(model=owner)}` for the cost"
            if "ask" in node.attr:
                fix = f"write `await {owner}(prompt)`"
            expected = f"what the model has in {self.whose}"
            self._fault(node.lineno, expected, ast.unparse(node), fix)
        tracked = owner.removesuffix(".usage_tracker")
        if tracked != owner and tracked in models and node.attr not in _TRACKED:
            fix = f"write `{tracked}.get_usage_summary()`"
            expected = f"what the model counts in {self.whose}"
            self._fault(node.lineno, expected, ast.unparse(node), fix)

    def _call(self, node: ast.Call) -> None:
        flow, classes = self.graph.flow, self.graph.shape.classes
        offered = self.template.operators if self.template is not None else {}
        built = self.graph.shape.operator_class(node.func)
        if built is not None:
            if built in offered and ast.unparse(node.func) not in self.own:
                self._adapt(node, [(built, offered[built][0], inspect.Signature())], certain=True)
            return
        handles = flow.calls.get(place_of(node), frozenset())
        asks = isinstance(node.func, ast.Attribute) and node.func.attr == "aask"
        if self.whose == "MetaGPT" and (MODEL, "") in handles and not asks:
            fix = f"write `await {ast.unparse(node.func)}.aask(prompt)`"
            expected = "a call that MetaGPT's model takes"
            self._fault(node.lineno, expected, f"{ast.unparse(node):.80}", fix)
        operators = sorted({operator for _, operator in handles if operator})
        if operators and {*operators} <= {"Custom", "CustomCodeGenerate"}:
            self._texts(node, operators)
        wanted = [
            (name, offered[name][1], self._ours(name)) for name in operators if name in offered
        ]
        derived = {kind for name, kind in classes.items() if name in self.own}
        certain = not derived & {*operators} and not handles & {*flow.handed_on}
        self._adapt(node, wanted, certain=certain)

    def _texts(self, node: ast.Call, operators: Sequence[str]) -> None:
        """Two of AFlow's operators put instruction and input together with `+`, so both must be
        texts."""
        names = list(self._ours(operators[0]).parameters)[1:]
        given = [*zip(names, node.args), *((word.arg, word.value) for word in node.keywords)]  # noqa: B905
        for name, value in given:
            if name == "instruction" and isinstance(value, ast.Constant) and value.value is None:
                value.value = ""  # as it is here
                self.changed.add(id(node))
            elif place_of(value) in self.graph.flow.whole or _is_no_text(value):
                fix = "give it a text, such as one of the result's values or str(...)"
                whose = " and ".join(operators)
                expected = f"a text for {whose}: AFlow adds instruction and input up"
                found = f"`{ast.unparse(value):.60}` as {name}"
                self._fault(value.lineno, expected, found, fix)

    def _adapt(
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
        if not wrong or self.template is None:
            return
        changed = ast.Call(node.func, list(node.args), list(node.keywords))
        left_out: list[str] = []
        for name, theirs, ours in () if _open(node) else wanted:
            dropped = _drop(changed, theirs, ours)
            left_out += [f"AFlow's {name} takes no `{what}`: left out" for what in dropped]
            given = {*list(theirs.parameters)[: len(changed.args)]}
            given |= {str(word.arg) for word in changed.keywords}
            for what, item in theirs.parameters.items():  # what AFlow demands, as it is here
                mine = ours.parameters.get(what, item).default
                demanded = what not in given and item.default is item.empty
                if demanded and isinstance(mine, (str, int, float)):
                    changed.keywords.append(ast.keyword(what, ast.Constant(mine)))
        if not any(_misfit(changed, theirs) for _, theirs, _ in wanted):
            node.args, node.keywords = changed.args, changed.keywords
            self.changed.add(id(node))
            for text in dict.fromkeys(left_out):
                self._note(node.lineno, text)
            return
        certain = certain and len(wrong) == len(wanted) and not _open(node)
        for name, theirs in wrong:
            found = f"`{ast.unparse(node):.80}`: {_misfit(node, theirs)}"
            if certain:
                expected = f"{name}{theirs}, as {self.template.where} has it"
                self._fault(node.lineno, expected, found, "give it these arguments")
            else:
                self._note(node.lineno, f"AFlow has {name}{theirs}; this may not fit: {found}")

    def _workflow(self) -> None:
        """What AFlow hands the workflow, and what it takes back: an answer and its cost."""
        shape = self.graph.shape
        call = workflow_methods(shape).get("__call__")
        line = call.lineno if call is not None else 0
        mine = [n for n in ast.walk(self.tree) if isinstance(n, Function) and n.lineno == line]
        if not mine:
            return
        method, arguments = mine[0], mine[0].args
        found = f"__call__({ast.unparse(arguments)})"
        entry_point = self.template.entry_point if self.template is not None else None
        if entry_point is False and shape.needs_entry_point:
            expected = "a workflow that takes the problem alone: this data set has no entry point"
            self._fault(line, expected, found, "write async def __call__(self, problem)")
        if entry_point and len(shape.parameters) < 2 and not arguments.vararg:
            last = [*arguments.posonlyargs, *arguments.args][-1]
            names = {item.arg for item in ast.walk(method) if isinstance(item, ast.arg)}
            if arguments.defaults or "entry_point" in names:
                fix = "write async def __call__(self, problem, entry_point)"
                expected = "a workflow that takes the problem and the entry point"
                self._fault(line, expected, found, fix)
            else:
                self.edits.append((last, f"{ast.unparse(last)}, entry_point"))
        scopes = (Function, ast.Lambda, ast.ClassDef)
        inner = [node for node in ast.walk(method) if isinstance(node, scopes)]
        others = {part for scope in inner if scope is not method for part in ast.walk(scope)}
        returns = [node for node in ast.walk(method) if isinstance(node, ast.Return)]
        for node in sorted(returns, key=lambda item: item.lineno):
            if node not in others:
                self._returned(node)

    def _returned(self, node: ast.Return) -> None:
        value = answer = node.value
        with_cost = isinstance(value, ast.Tuple) and len(value.elts) == 2
        if isinstance(value, ast.Tuple) and with_cost:
            answer = value.elts[0]
        if value is None or answer is None or isinstance(answer, ast.Tuple):
            return  # it fails here as well
        shown = ast.unparse(node)[:80]
        whole = place_of(answer) in self.graph.flow.whole
        if whole or (_is_no_text(answer) and not isinstance(answer, ast.Constant)):
            fix = (
                f"return its text, as in `{ast.unparse(answer)}[...]`"
                if whole
                else "return one text"
            )
            self._fault(node.lineno, "the text of the answer", shown, fix)
        if with_cost:
            return
        if isinstance(value, (ast.Name, ast.Call, ast.Await, ast.Attribute, ast.IfExp)):
            if not whole:
                what = f"`{shown}` must give two values, the answer and its cost"
                self._note(node.lineno, f"AFlow takes an answer and a cost; {what}")
            return
        models = sorted(name for name in self.graph.flow.models if name.startswith("self."))
        cost = _COST[self.whose].format(model=models[0]) if models else "0"
        node.value = ast.Tuple([value, ast.parse(cost, mode="eval").body], ast.Load())
        self.changed.add(id(node))


def _is_prompts(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "prompts"


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
    doing = (ast.Call, ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)

    def still(value: ast.expr) -> bool:
        return not any(isinstance(item, doing) for item in ast.walk(value))

    dropped: list[str] = []
    if any(item.kind is item.VAR_KEYWORD for item in there.values()):
        return dropped
    while len(there) < len(node.args) <= len(names) and still(node.args[-1]):
        dropped.append(names[len(node.args) - 1])
        node.args.pop()
    for word in list(node.keywords):
        if word.arg not in there and still(word.value):
            node.keywords.remove(word)
            dropped.append(str(word.arg))
    return dropped


def _is_no_text(node: ast.expr) -> bool:
    """Whether an expression is surely something else than a text."""
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str)
    kinds = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.DictComp, ast.ListComp, ast.SetComp)
    return isinstance(node, kinds)
