"""Writes a graph as a `round_N` folder that AFlow runs: graph.py, prompt.py, __init__.py.

The code keeps its text except for imports, prompts (written into prompt.py), instructions (which
AFlow lacks: they become constants that the code passes) and calls that do not fit AFlow's template
of the data set: an argument that AFlow requires gets our default, one that it does not take is
dropped with a note. What AFlow cannot do is a fault with its line; what may not fit is a note.
Operator prompts, which AFlow reads only from its template, go to prompts.json, which only we read.
Nothing is imported or executed.
"""

from __future__ import annotations

import ast
import inspect
import json
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Mapping
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
"""The names of these modules in the header."""
_COST = '{}.get_usage_summary()["total_cost"]'


@dataclass(frozen=True)
class SavedRound:
    """What was written."""

    folder: Path
    files: tuple[Path, ...]
    only_here: tuple[str, ...]
    """Names of operator prompts and instructions that AFlow does not read."""
    notes: tuple[str, ...] = ()
    """What AFlow does differently or may fail on, with line numbers of the original graph.py."""


def save_round(
    graph: Graph,
    folder: str | Path,
    *,
    dataset: str | None = None,
    round_number: int | None = None,
) -> SavedRound:
    """Write a graph as a round of AFlow.

    Args:
        folder: AFlow looks for it at `workspace/DATASET/workflows/round_N`.
        dataset: None: from that path, else the graph's own. `round_number` likewise.

    Raises:
        BadInput: the folder already holds a graph, the data set or round is unknown, the graph
            cannot be parsed, or its calls do not fit AFlow's template of the data set.
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
        faults.append(("a folder without a graph", "one that exists", "name another round"))
    if not re.fullmatch(r"[A-Za-z_]\w*", dataset):
        fix = "write to .../DATASET/workflows/round_N, or name the data set"
        faults.append(("the name of a data set", repr(dataset), fix))
    if round_number is None:
        faults.append(("the number of the round", "none", "name the folder round_N"))
    if faults:
        told = [Fault(str(folder), *fault) for fault in faults]
        raise BadInput("The graph cannot be written there.", told)

    fitted = _Fitted(graph, AFLOW_NAMES.get(dataset.casefold(), ""))
    if fitted.faults:
        raise BadInput(f"AFlow would fail on this round of {dataset}.", fitted.faults)
    if not fitted.offered:
        fitted.notes.append(f"AFlow's template of {dataset} is not known: calls were not checked")
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
    """Edits for the changed nodes of a tree; of nested ones only the outermost."""
    for child in ast.iter_child_nodes(node):
        # Python 3.11 has no columns inside an f-string: replace it as a whole.
        whole = isinstance(child, ast.JoinedStr) and any(id(n) in changed for n in ast.walk(child))
        if id(child) in changed or whole:
            yield child, ast.unparse(child)
        else:
            yield from _outermost(child, changed)


def _prompt_source(source: str, constants: Mapping[str, str]) -> str:
    """prompt.py with these constants replaced; those that it lacks are appended."""
    left = dict(constants)
    edits: list[Edit] = []
    for node in reversed(_tree(source, inside.PROMPT_FILE).body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = getattr(node.targets[0], "id", "")
            if name in left:
                edits.append((node.value, literal(left.pop(name))))
    added = "".join(f"\n{name} = {literal(value)}\n" for name, value in left.items())
    return edited(source, edits) + added


def literal(text: str) -> str:
    """A Python literal of the text; a multi-line text becomes a triple-quoted string."""
    if "\n" not in text or not text.replace("\n", "").replace("\t", "").isprintable():
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    if '"""' in text or text.endswith('"'):
        escaped = escaped.replace('"', '\\"')
    return f'"""{escaped}"""'


# Each data set of AFlow has its own operators, and their signatures differ: the ensemble of DROP
# takes no problem, that of MATH requires one. These are the signatures in its six templates.

_CALLS: dict[str, Callable[..., None]] = {
    "Custom": lambda input, instruction: None,
    "AnswerGenerate": lambda input, mode=None: None,
    "CustomCodeGenerate": lambda problem, entry_point, instruction: None,
    "Programmer": lambda problem, analysis="None": None,
    "ScEnsemble": lambda solutions, problem: None,
    "Test": lambda problem, solution, entry_point, test_loop=3: None,
}
_MATH = ("Custom", "Programmer", "ScEnsemble")
_CODE = ("Custom", "CustomCodeGenerate", "ScEnsemble", "Test")
_QA = ("Custom", "AnswerGenerate", "ScEnsemble")
_OFFERED = {
    "GSM8K": _MATH, "MATH": _MATH, "HumanEval": _CODE, "MBPP": _CODE, "HotpotQA": _QA, "DROP": _QA
}  # fmt: skip
AFLOW_NAMES = {name.casefold(): name for name in _OFFERED}
"""AFlow's spelling of its data sets, which paths and imports need, by lower-case name."""
_BUILT = inspect.signature(lambda llm, name=None: None)


class _Fitted:
    """The tree of graph.py, changed to pass its instructions and to fit a template.

    `constants`: instructions, for prompt.py. `prompts`: whole prompts, for prompts.json, of
    instances whose call takes no instruction. `lost`: instances that their instruction may not
    reach. `changed`: ids of nodes to unparse again. `edits`: replacement texts for other nodes.
    """

    def __init__(self, graph: Graph, dataset: str) -> None:
        self.graph, self.kind = graph, _OFFERED.get(dataset, ())
        self.offered = {name: inspect.signature(_CALLS[name]) for name in self.kind}
        if self.kind is _QA:
            self.offered["ScEnsemble"] = inspect.signature(lambda solutions: None)
        self.source = graph.sources[inside.GRAPH_FILE]
        self.tree = _tree(self.source, inside.GRAPH_FILE)
        self.changed: set[int] = set()
        self.edits: list[Edit] = []
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.future = ""  # imports from `__future__`, which go before the header
        classes = [item.name for item in self.tree.body if isinstance(item, ast.ClassDef)]
        self.own = {graph.shape.classes.get(name) for name in classes}
        self._instruct()
        if not graph.flow.complete:
            self._note(0, "it is too large to be followed: its calls were not all checked")
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
                self._offered(node.lineno, graph.shape.operator_class(node))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imported(node)
            if isinstance(node, ast.Call):
                self._call(node)
        self._workflow()

    def _fault(self, line: int, expected: str, found: str, fix: str) -> None:
        fault = Fault(f"{self.graph.label}/{inside.GRAPH_FILE}:{line}", expected, found, fix)
        if fault not in self.faults:
            self.faults.append(fault)

    def _note(self, line: int, text: str) -> None:
        self.notes.append(f"{inside.GRAPH_FILE}:{line}: {text}")

    def _ours(self, operator: str) -> inspect.Signature:
        return inspect.signature(self.graph.known[operator].__call__)

    def _instruct(self) -> None:
        """Turn instructions into constants of prompt.py; fill `self.prompts` from them if the code
        reads it, and pass them to calls that omit their argument `instruction`."""
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
        fills = bool(told) or not assigned  # else the code does, as a saved round
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
                continue  # one call of several operators cannot pass each its own
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
        """Assign `self.prompts` before the constructor's first statement. Where the constructor
        assigns it too, instructions of the graph override its texts; other names keep them."""
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

    # What AFlow's template offers and takes

    def _offered(self, line: int, name: str | None) -> None:
        if self.offered and name not in (*self.offered, None, "Operator", "*"):
            expected = f"an operator of AFlow's template: {', '.join(self.offered)}"
            fix = "use one of them, or add it to that template"
            self._fault(line, expected, f"operator.{name}", fix)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        """Replace imports that the header already has by assignments; keep the others."""
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
        """Change a call so that it fits each operator that it may build or reach; else report which
        it does not fit. The graph's own operator classes are not checked."""
        built = self.graph.shape.operator_class(node.func)
        handles = self.graph.flow.calls.get(place_of(node), frozenset())
        # Name, AFlow's signature, ours.
        wanted = [
            (name, self.offered[name], self._ours(name))
            for name in sorted({operator for _, operator in handles} - self.own)
            if name in self.offered
        ]
        if built is not None and built in self.offered and built not in self.own:
            wanted = [(built, _BUILT, inspect.Signature())]
        wrong = [(name, theirs) for name, theirs, _ in wanted if _misfit(node, theirs)]
        if not wrong:
            return
        changed = ast.Call(node.func, list(node.args), list(node.keywords))
        left_out: list[str] = []
        for name, theirs, ours in () if _open(node) else wanted:
            dropped = _drop(changed, theirs, ours)
            left_out += [f"AFlow's {name} takes no `{what}`: left out" for what in dropped]
            given = {*list(theirs.parameters)[: len(changed.args)]}
            given |= {str(word.arg) for word in changed.keywords}
            for what, item in theirs.parameters.items():  # AFlow requires it: pass our default
                mine = ours.parameters.get(what, item).default
                demanded = what not in given and item.default is item.empty
                if demanded and isinstance(mine, (str, int, float)):
                    changed.keywords.append(ast.keyword(what, ast.Constant(mine)))
        if not any(_misfit(changed, theirs) for _, theirs, _ in wanted):
            node.args, node.keywords = changed.args, changed.keywords
            self.changed.add(id(node))
            for text in left_out:
                self._note(node.lineno, text)
            return
        for name, theirs in wrong:
            expected, found = f"{name}{theirs}, as in AFlow", f"`{ast.unparse(node):.80}`"
            if len(wrong) == len(wanted) and not _open(node):
                self._fault(node.lineno, expected, found, _misfit(node, theirs))
            else:
                self._note(node.lineno, f"{found} may not fit {expected}")

    def _workflow(self) -> None:
        """Fit `__call__`: AFlow passes an entry point for code, and expects (answer, cost)."""
        shape = self.graph.shape
        call = workflow_methods(shape).get("__call__")
        line = call.lineno if call is not None else 0
        mine = [n for n in ast.walk(self.tree) if isinstance(n, Function) and n.lineno == line]
        if not mine:
            return
        arguments = mine[0].args
        if self.offered and self.kind is not _CODE and shape.needs_entry_point:
            expected = "a workflow that takes the problem alone: this data set has no entry point"
            fix = "write async def __call__(self, problem)"
            self._fault(line, expected, f"__call__({ast.unparse(arguments)})", fix)
        if self.kind is _CODE and len(shape.parameters) < 2 and not arguments.vararg:
            last = [*arguments.posonlyargs, *arguments.args][-1]
            if arguments.defaults or arguments.kwonlyargs:
                expected = "a workflow that takes the problem and the entry point"
                fix = "write async def __call__(self, problem, entry_point)"
                self._fault(line, expected, f"__call__({ast.unparse(arguments)})", fix)
            else:
                self.edits.append((last, f"{ast.unparse(last)}, entry_point=None"))
        models = sorted(name for name in self.graph.flow.models if name.startswith("self."))
        cost = _COST.format(models[0]) if models else "0"
        pending: list[ast.AST] = list(mine[0].body)
        while pending:  # without the returns of nested functions
            node = pending.pop(0)
            value = node.value if isinstance(node, ast.Return) else None
            if isinstance(value, (ast.Name, ast.Call, ast.Await, ast.Attribute, ast.IfExp)):
                what = f"`{ast.unparse(node):.80}` must give AFlow two values, answer and cost"
                self._note(value.lineno, what)
            elif value is not None and not isinstance(value, ast.Tuple):
                both = [value, ast.parse(cost, mode="eval").body]
                node.value = ast.Tuple(both, ast.Load())  # type: ignore[attr-defined]
                self.changed.add(id(node))
            if not isinstance(node, (Function, ast.Lambda, ast.ClassDef)):
                pending[:0] = ast.iter_child_nodes(node)


def _is_prompts(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "prompts"


def _open(node: ast.Call) -> bool:
    """Whether a call has `*` or `**` arguments."""
    starred = any(isinstance(item, ast.Starred) for item in node.args)
    return starred or any(word.arg is None for word in node.keywords)


def _misfit(node: ast.Call, signature: inspect.Signature) -> str:
    """Why a call does not fit a signature; empty if it does."""
    if _open(node):
        return "its arguments cannot be seen"
    try:
        signature.bind(*node.args, **{str(word.arg): word for word in node.keywords})
    except TypeError as error:
        return str(error)
    return ""


def _drop(node: ast.Call, theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    """Remove arguments that AFlow's operator does not take and whose evaluation has no effects."""
    names, there = list(ours.parameters)[1:], theirs.parameters
    doing = (ast.Call, ast.Await, ast.NamedExpr)

    def still(value: ast.expr) -> bool:
        return not any(isinstance(item, doing) for item in ast.walk(value))

    dropped: list[str] = []
    while len(there) < len(node.args) <= len(names) and still(node.args[-1]):
        dropped.append(names[len(node.args) - 1])
        node.args.pop()
    for word in list(node.keywords):
        if word.arg not in there and still(word.value):
            node.keywords.remove(word)
            dropped.append(str(word.arg))
    return dropped
