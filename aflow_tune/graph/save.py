"""A graph written back as a `round_N` folder that AFlow runs: graph.py, prompt.py, __init__.py.

The code keeps its text, but for import lines (written anew), prompts (written into prompt.py),
instructions (constants that the code hands over, as AFlow does not know them), and calls that
AFlow's template of the data set does not take: an argument that AFlow demands gets the value that
it has here, one that AFlow does not know is left out, which is noted. What would fail in AFlow
wherever it is reached is a fault with its line; what may fail is a note. Prompts of operators,
which AFlow reads from its template alone, are kept in prompts.json beside it, which only we read.
Nothing is imported or run.
"""

from __future__ import annotations

import ast
import copy
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
from aflow_tune.graph.flow import place_of
from aflow_tune.graph.graph import PROMPTS_FILE, Graph
from aflow_tune.graph.shape import Edit, Function, edited, parse, workflow_methods
from aflow_tune.operators.prompts import APART, MAIN, apart, own_text, with_instruction

_HEADER = """\
import workspace.{dataset}.workflows.template.operator as operator
import workspace.{dataset}.workflows.round_{round}.prompt as prompt_custom
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType
"""
_USUAL = {"operator": "operator", "prompt": "prompt_custom"}
"""What the header calls these modules."""
_COST = '{}.get_usage_summary()["total_cost"]'
_METAGPT = {"aask": "await {}(prompt)", "cost_manager": _COST} | dict.fromkeys(
    ("call_count", "get_total_cost", "total_completion_tokens", "total_prompt_tokens"),
    "{}.get_usage_summary()",
)
"""What MetaGPT's model has and AFlow's has not, with what AFlow's has instead."""


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
    """Write a graph as a round of AFlow.

    Args:
        folder: to be made; AFlow finds it at `workspace/DATASET/workflows/round_N`.
        dataset: None for the one of that path, or else the graph's own.
        round_number: None for the one of the folder's name, or else the graph's own.

    Raises:
        BadInput: the folder holds a graph already, data set or round cannot be told, or AFlow's
            template of the data set does not take the graph's calls.
    """
    folder = Path(folder)
    workflows = folder.resolve().parent
    if place := re.fullmatch(r"round_(\d+)", folder.resolve().name):
        round_number = int(place[1]) if round_number is None else round_number
        if workflows.name.startswith("workflows"):
            dataset = dataset or workflows.parent.name
    dataset = dataset or graph.dataset or ""
    round_number = graph.round if round_number is None else round_number
    faults = []
    if (folder / inside.GRAPH_FILE).exists():
        found = f"{folder / inside.GRAPH_FILE} exists"
        faults.append(Fault(str(folder), "a folder without a graph", found, "name another round"))
    if not re.fullmatch(r"[A-Za-z_]\w*", dataset):
        fix = "write to .../DATASET/workflows/round_N, or name the data set"
        faults.append(Fault(str(folder), "the name of a data set", repr(dataset), fix))
    if round_number is None:
        fix = "name the folder round_N, or give the round"
        faults.append(Fault(str(folder), "the number of the round", "none", fix))
    if faults:
        raise BadInput("The graph cannot be written there.", faults)

    template = template_of(dataset, workflows)
    fitted = _Fitted(graph, template)
    if fitted.faults:
        raise BadInput(f"AFlow would fail on this round of {dataset}.", fitted.faults)
    if template is None:
        fitted.notes.append(
            f"{dataset} has no template of AFlow's that is known here or lies at "
            f"{folder.parent / 'template'}: its calls were not checked"
        )
    edits = [*fitted.edits, *_outermost(fitted.tree, fitted.changed)]
    body = re.sub(r"\n{4,}", "\n\n\n", edited(fitted.source, edits)).strip("\n")
    header = _HEADER.format(dataset=dataset, round=round_number)
    prompts = graph.sources.get(inside.PROMPT_FILE, "")
    texts = {
        inside.GRAPH_FILE: f"{fitted.future}{header}\n{body}\n",
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


def _tree(source: str, name: str) -> ast.Module:
    tree, faults = parse(source, name)
    if tree is None:
        raise BadInput(f"{name} cannot be read.", faults)
    return tree


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
    usual = inspect.signature(lambda llm, name=None: None)
    for node in tree.body:
        body = node.body if isinstance(node, ast.ClassDef) else []
        members = {item.name: _signature(item.args) for item in body if isinstance(item, Function)}
        if isinstance(node, ast.ClassDef) and "__call__" in members:
            found[node.name] = (members.get("__init__", usual), members["__call__"])
    return found


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a method, without self. A default is only known to be there."""
    bare = copy.deepcopy(arguments)
    for item in ast.walk(bare):
        if isinstance(item, ast.arg):
            item.annotation = None
    bare.defaults = [ast.Constant(None) for _ in bare.defaults]
    bare.kw_defaults = [default and ast.Constant(None) for default in bare.kw_defaults]
    # Names alone are left of it: nothing of the file is evaluated.
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(bare, ast.Constant(None))))
    signature = inspect.signature(eval(compile(expression, "template", "eval"), {}))
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Fitted:
    """The tree of graph.py, made to hand over its instructions and to fit a template.

    Attributes:
        constants: instructions, for prompt.py.
        prompts: for prompts.json: whole prompts of instances whose call has no argument for an
            instruction, which we read and AFlow does not.
        lost: instances whose calls could not be told, so that their instruction may not reach them.
        changed: ids of nodes of the tree that were changed.
        edits: other texts for nodes that are no expressions.
        future: its imports from `__future__`, which go before the header.
    """

    def __init__(self, graph: Graph, template: Template | None) -> None:
        self.graph, self.template = graph, template
        self.source = graph.sources[inside.GRAPH_FILE]
        self.tree = _tree(self.source, inside.GRAPH_FILE)
        self.changed: set[int] = set()
        self.edits: list[Edit] = []
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.future = ""
        self._instruct()
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        self.own = {n.name for n in classes if any(isinstance(m, Function) for m in n.body)}
        """Classes of the graph's with methods of their own: what they take is theirs to say."""
        flow, shape = graph.flow, graph.shape
        if not flow.complete:
            self._note(0, "it is too large to be followed: its calls were not all checked")
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
                self._offered(node.lineno, shape.operator_class(node))
            if isinstance(node, ast.Attribute) and node.attr in _METAGPT:
                owner = ast.unparse(node.value).removesuffix(".usage_tracker")
                if owner in flow.models:
                    fix = f"write `{_METAGPT[node.attr].format(owner)}`"
                    self._fault(node.lineno, "what AFlow's model has", ast.unparse(node), fix)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported(node)
            if isinstance(node, ast.Call):
                self._call(node)
        self._workflow()
        refused = {fault.found for fault in self.faults}
        for (line, *_), handles in flow.calls.items():  # those that no name tells, as by `getattr`
            for _, operator in handles:
                if operator and f"operator.{operator}" not in refused:
                    self._offered(line, operator)
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

    def _instruct(self) -> None:
        """Instructions become constants of prompt.py. `self.prompts` is filled from them where the
        code reads it, and a call that leaves its `instruction` to be filled in gets it."""
        graph, shape, told = self.graph, self.graph.shape, self.graph.told
        nodes = list(ast.walk(self.tree))
        by_key = [
            str(node.slice.value)
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
            if _is_prompts(node.value)
        ]
        used = {*by_key} | {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and shape.modules.get(getattr(node.value, "id", "")) == "prompt"
        }
        assigns = [node for node in nodes if isinstance(node, ast.Assign)]
        assigned = any(_is_prompts(target) for node in assigns for target in node.targets)
        fills = bool(told) or not assigned  # else it does so itself, as a round saved before
        texts = {**dict.fromkeys(by_key, ""), **told} if fills else {}
        taken = {*shape.constants, *graph.constants}
        self.constants: dict[str, str] = {}
        places: dict[str, str] = {}
        for name, text in texts.items():
            free = name if name.isidentifier() and not keyword.iskeyword(name) else "PROMPT"
            while free in taken:
                free = f"{free}_INSTRUCTION"
            taken.add(free)
            self.constants[free] = text
            places[name] = f"{_USUAL['prompt']}.{free}"
        kinds = {name: kind for name, kind in shape.instances.items() if kind in graph.known}
        takes = {name for name in kinds if "instruction" in self._ours(kinds[name]).parameters}
        for call in [node for node in nodes if isinstance(node, ast.Call)]:
            names = {name for name, _ in graph.flow.calls.get(place_of(call), ())}
            if _open(call) or len(names) != 1 or not names <= takes & told.keys():
                continue  # of several operators behind one call none can be told its own
            name = names.pop()
            used.add(name)
            before = list(self._ours(kinds[name]).parameters).index("instruction")
            if len(call.args) < before and all(word.arg != "instruction" for word in call.keywords):
                ends = apart(told[name]) == told[name]
                place = places[name] if ends else f"{places[name]} + {APART!r}"
                call.keywords.append(ast.keyword("instruction", ast.parse(place, mode="eval").body))
                self.changed.add(id(call))
        init = workflow_methods(shape).get("__init__")
        asks = any(getattr(n, "attr", getattr(n, "value", None)) == "prompts" for n in nodes)
        if init is not None and asks and fills:
            self._fill(init, places)
        self.lost = [name for name in takes & told.keys() if name not in used or init is None]
        self.prompts: dict[str, dict[str, str]] = {}
        for name in [name for name in kinds if name in told and name not in takes]:
            kind = graph.known[kinds[name]]
            main = MAIN if MAIN in kind.asks else next(iter(kind.asks), "")
            if main and told[name].strip():
                text = own_text(kind.__name__, main, kind.asks[main])
                whole = with_instruction(text, told[name], kind.asks[main])
                self.prompts[name] = {main: whole}

    def _fill(self, init: Function, places: Mapping[str, str]) -> None:
        """`self.prompts` in front of the constructor's first statement. The texts that were told go
        over those that the constructor itself puts there, and the others, which nobody gave, below
        them."""
        first, *rest = init.body
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        first = rest[0] if rest and is_docstring else first
        own = init.args.args[0].arg if init.args.args else "self"
        entries = {name: f"{name!r}: {place}" for name, place in places.items()}
        indent = self.source.encode().splitlines()[first.lineno - 1][: first.col_offset].decode()
        joint = "; " if indent.strip() else f"\n{indent}"
        here = {"lineno": first.lineno, "col_offset": first.col_offset}
        nothing = ast.Pass(**here, end_lineno=first.lineno, end_col_offset=first.col_offset)
        self.edits.append((nothing, f"{own}.prompts = {{{', '.join(entries.values())}}}{joint}"))
        for node in ast.walk(init):
            if isinstance(node, ast.Assign) and any(map(_is_prompts, node.targets)):
                above = [entry for name, entry in entries.items() if name in self.graph.told]
                parts = [*entries.values(), f"**({ast.unparse(node.value)})", *above]
                self.edits.append((node.value, f"{{{', '.join(parts)}}}"))

    # What AFlow's template and its model take

    def _offered(self, line: int, name: str | None) -> None:
        template = self.template
        if template and name not in (*template.operators, None, "Operator", "*"):
            expected = f"an operator of {template.where}: {', '.join(template.operators)}"
            fix = "use one of them, or add it to that template"
            self._fault(line, expected, f"operator.{name}", fix)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        """Imports of what the header brings become names for it; others stay."""
        shown, module = ast.unparse(node), ""
        if isinstance(node, ast.ImportFrom):
            module = inside.absolute(node.module or "", node.level)
        if module == "__future__":
            self.future += f"{shown}\n"
            self.edits.append((node, ""))
            return
        kind, statements = inside.shim_of(module), []
        for alias in node.names:
            inner = inside.shim_of(f"{module}.{alias.name}".lstrip(".")) if kind is None else None
            usual = _USUAL.get(inner or "") if module or alias.asname else None
            if alias.name in ("create_llm_instance", "DatasetType") and kind is not None:
                usual = alias.name
            elif kind in _USUAL and alias.name != "*":
                usual = f"{_USUAL[kind]}.{alias.name}"
            if kind == "operator":
                self._offered(node.lineno, alias.name)
            if usual is None:
                if "metagpt." in shown:
                    fix = "leave it out, or write what AFlow has in its place"
                    self._fault(node.lineno, "an import that AFlow has", shown, fix)
                return
            if (bound := alias.asname or alias.name) != usual:
                statements.append(f"{bound} = {usual}")
        self.edits.append((node, "; ".join(statements)))

    def _call(self, node: ast.Call) -> None:
        flow, classes = self.graph.flow, self.graph.shape.classes
        offered = self.template.operators if self.template is not None else {}
        built = self.graph.shape.operator_class(node.func)
        if built is not None:
            if built in offered and ast.unparse(node.func) not in self.own:
                self._adapt(node, [(built, offered[built][0], inspect.Signature())], certain=True)
            return
        handles = flow.calls.get(place_of(node), frozenset())
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
            elif self.graph.flow.whole.get(place_of(value)) or _is_no_text(value):
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
        pending: list[ast.AST] = list(method.body)
        while pending:  # without what functions inside of it return
            node = pending.pop(0)
            if isinstance(node, ast.Return):
                self._returned(node)
            if not isinstance(node, (Function, ast.Lambda, ast.ClassDef)):
                pending[:0] = ast.iter_child_nodes(node)

    def _returned(self, node: ast.Return) -> None:
        value = answer = node.value
        with_cost = isinstance(value, ast.Tuple) and len(value.elts) == 2
        if isinstance(value, ast.Tuple) and with_cost:
            answer = value.elts[0]
        if value is None or answer is None or isinstance(answer, ast.Tuple):
            return  # it fails here as well
        shown = ast.unparse(node)[:80]
        whole = self.graph.flow.whole.get(place_of(answer), False)
        if whole or (_is_no_text(answer) and not isinstance(answer, ast.Constant)):
            fix = "return one text, such as one of the result's values"
            self._fault(node.lineno, "the text of the answer", shown, fix)
        if with_cost:
            return
        if isinstance(value, (ast.Name, ast.Call, ast.Await, ast.Attribute, ast.IfExp)):
            what = f"`{shown}` must give two values, the answer and its cost"
            self._note(node.lineno, f"AFlow takes an answer and a cost; {what}")
            return
        models = sorted(name for name in self.graph.flow.models if name.startswith("self."))
        cost = _COST.format(models[0]) if models else "0"
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
