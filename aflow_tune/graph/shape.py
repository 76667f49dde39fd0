"""What a graph's source says about itself, read without running any of it.

`examine` parses graph.py and the prompt files, finds the workflow, its operators and its
prompts, and every fault that would keep the graph from running: it is the check before a run,
and the ground on which `flow.py` finds the edges. A fault here is definite; what may or may
not be reached (an attribute that a branch reads) is left to the run, which names its line.

The source may come from anywhere: it is parsed, never compiled or imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aflow_tune.errors import Fault
from aflow_tune.graph import inside
from aflow_tune.graph.tree import certain, walk, without_main

MAX_SOURCE_CHARS = 256 * 1024
"""Of one file. A graph is a page or two; the parser's memory is bounded with its input."""
INIT_ARGUMENTS = ("name", "llm_config", "dataset")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class BuiltOperator:
    """One place in graph.py where an operator is built, as `operator.Custom(self.llm)`."""

    instance: str
    """The attribute or variable that it is assigned to, else the class's name and a number."""
    operator: str
    line: int
    column: int


@dataclass
class Shape:
    """A graph as its source shows it. Empty where the source could not be read."""

    operators: tuple[BuiltOperator, ...] = ()
    parameters: tuple[str, ...] = ()
    """Of `__call__`, without self: the problem, and for code the entry point."""
    needs_entry_point: bool = False
    constants: dict[str, str] = field(default_factory=dict)
    """Texts that prompt.py assigns at its top level."""
    tree: ast.Module | None = None
    """Without what `if __name__ == "__main__":` holds."""
    certain: set[ast.AST] = field(default_factory=set)
    """Nodes of the tree that every run reaches: only there a missing prompt is a fault."""
    workflow: ast.ClassDef | None = None
    classes: dict[str, str] = field(default_factory=dict)
    """Names under which operators' classes are known in graph.py, to the operator's name."""
    modules: dict[str, str] = field(default_factory=dict)
    """Names of imported modules of AFlow, to what stands in for them (`inside.shim_of`)."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def instances(self) -> dict[str, str]:
        """Instance name to operator name, in the order of the source."""
        return {built.instance: built.operator for built in self.operators}

    def operator_class(self, node: ast.expr) -> str | None:
        """The operator that an expression names as a class, such as `operator.Custom`."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                is_module = self.modules.get(node.value.id) == "operator"
            else:
                is_module = inside.shim_of(ast.unparse(node.value)) == "operator"
            return node.attr if is_module else None
        return None


def parse(source: str, label: str) -> tuple[ast.Module | None, list[Fault]]:
    """The syntax tree of a file, or why there is none. `label` is how messages name the file."""
    if len(source) > MAX_SOURCE_CHARS:
        found = f"{len(source)} characters"
        expected = f"a file of at most {MAX_SOURCE_CHARS} characters"
        return None, [Fault(label, expected, found, "shorten it: long data belongs in the rows")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source), []
    except SyntaxError as error:
        text = (error.text or "").strip()
        found = f"{error.msg}: {text!r:.120}" if text else error.msg
        where = f"{label}:{error.lineno}" if error.lineno else label
    except (ValueError, RecursionError, MemoryError) as error:
        found, where = f"{type(error).__name__}: {error}", label
    return None, [Fault(where, "Python source", found, "correct the file")]


def examine(
    files: Mapping[str, str],
    operators: Collection[str],
    prompts: Collection[str],
    label: str,
) -> Shape:
    """Read a graph.

    Args:
        files: text of graph.py, and of prompt.py and op_prompt.py where there are any.
        operators: names of the operators that exist.
        prompts: names of prompt constants that are given beside prompt.py.
        label: the folder, as messages name it.
    """
    shape = Shape()
    graph_label = f"{label}/{inside.GRAPH_FILE}"
    tree, shape.faults = parse(files[inside.GRAPH_FILE], graph_label)
    shape.constants, complete, faults = _constants(files, label)
    shape.faults += faults
    if tree is None:
        return shape
    try:
        shape.tree = without_main(tree)
        shape.certain = certain(tree)
        nodes = walk(tree)
        _Names(shape, operators, graph_label, files).read(tree, nodes)
        known = {*shape.constants, *prompts} if complete else None
        _check_attributes(shape, nodes, operators, known, graph_label)
        _workflow(shape, graph_label)
        shape.operators = tuple(_built(shape, nodes))
    except RecursionError:
        cure = "split the expression"
        found = "an expression nested too deeply"
        shape.faults.append(Fault(graph_label, "a readable graph", found, cure))
    return shape


def _constants(files: Mapping[str, str], label: str) -> tuple[dict[str, str], bool, list[Fault]]:
    """The texts of prompt.py, and whether it can hold no other names."""
    if inside.PROMPT_FILE not in files:
        return {}, True, []
    tree, faults = parse(files[inside.PROMPT_FILE], f"{label}/{inside.PROMPT_FILE}")
    if tree is None:
        return {}, False, faults
    texts: dict[str, str] = {}
    complete = True
    for node in tree.body:
        names = _assigned_names(node)
        if names is None:
            # Anything but a docstring may define more names than can be seen.
            complete = complete and isinstance(node, ast.Expr) and _is_text(node.value)
            continue
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        for name in names:
            texts[name] = value.value if _is_text(value) else ""  # type: ignore[union-attr]
    return texts, complete, faults


def constants(source: str) -> dict[str, str]:
    """The texts that a prompt.py assigns; none where it cannot be read."""
    return _constants({inside.PROMPT_FILE: source}, "")[0]


def _assigned_names(node: ast.stmt) -> list[str] | None:
    if isinstance(node, ast.Assign):
        targets: Sequence[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    else:
        return None
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else None


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class _Names:
    """Reads the imports and the classes of graph.py: which names mean which shims."""

    def __init__(
        self, shape: Shape, operators: Collection[str], label: str, files: Mapping[str, str]
    ) -> None:
        self.shape, self.operators, self.label, self.files = shape, operators, label, files
        self.shape.modules = {"operator": "operator", "prompt_custom": "prompt"}

    def read(self, tree: ast.Module, nodes: Sequence[ast.AST]) -> None:
        optional = {
            id(node)
            for block in nodes
            if isinstance(block, ast.Try)
            for statement in block.body
            for node in ast.walk(statement)
        }
        for node in nodes:
            must = id(node) not in optional
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._module(node, alias, must)
            elif isinstance(node, ast.ImportFrom):
                self._from(node, must)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    derived = self.shape.operator_class(base)
                    if derived is not None:
                        self.shape.classes[node.name] = derived

    def _module(self, node: ast.Import, alias: ast.alias, must: bool) -> None:
        kind = inside.shim_of(alias.name)
        bound = alias.asname or alias.name.partition(".")[0]
        if kind is not None and (alias.asname or "." not in alias.name):
            self.shape.modules[bound] = kind
        elif alias.asname or "." not in alias.name:
            self.shape.modules.pop(bound, None)
        self._check(node, alias.name, kind, must)

    def _from(self, node: ast.ImportFrom, must: bool) -> None:
        module = inside.absolute(node.module or "", node.level)
        kind = inside.shim_of(module)
        for alias in node.names:
            bound = alias.asname or alias.name
            inner = inside.shim_of(f"{module}.{alias.name}")
            if kind is None and inner is not None:
                self.shape.modules[bound] = inner
                self._check(node, f"{module}.{alias.name}", inner, must)
            elif kind == "operator":
                self._operator(node, alias)
            elif kind in inside.NAMES_OF and alias.name not in (*inside.NAMES_OF[kind], "*"):
                offered = ", ".join(inside.NAMES_OF[kind])
                self._fault(node, f"one of: {offered}", f"{alias.name} from {module}", "use those")
            elif kind is None:
                self._check(node, module, None, must)
            else:
                self._check(node, module, kind, must)

    def _operator(self, node: ast.ImportFrom, alias: ast.alias) -> None:
        if alias.name == "*":
            self.shape.classes.update({name: name for name in self.operators})
        elif alias.name in (*self.operators, "Operator"):
            self.shape.classes[alias.asname or alias.name] = alias.name
        else:
            self.shape.faults.append(
                unknown_operator(alias.name, self.operators, f"{self.label}:{node.lineno}")
            )

    def _check(self, node: ast.stmt, module: str, kind: str | None, must: bool) -> None:
        if kind == "template prompt" and inside.TEMPLATE_PROMPT_FILE not in self.files:
            cure = "put the template folder of this data set beside the graph's folder"
            self._fault(node, "template/op_prompt.py", "no such file", cure)
        if kind is not None or not must:
            return
        top = module.partition(".")[0]
        if top in inside.FOREIGN_PACKAGES or module.startswith("workflows."):
            cure = (
                "a graph may import its prompts, its operators, create_llm_instance, "
                "DatasetType, CostManager and Python's modules"
            )
            self._fault(node, "an import that a graph has", f"import of {module}", cure)
        elif top not in sys.stdlib_module_names and not _is_installed(top):
            cure = f"install {top}, or do without it"
            self._fault(node, "a module that is installed", f"import of {module}", cure)

    def _fault(self, node: ast.stmt, expected: str, found: str, cure: str) -> None:
        self.shape.faults.append(Fault(f"{self.label}:{node.lineno}", expected, found, cure))


def _is_installed(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def unknown_operator(name: str, operators: Collection[str], where: str) -> Fault:
    """The fault of an operator that does not exist."""
    near = difflib.get_close_matches(name, operators, 1)
    cure = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(sorted(operators))
    return Fault(
        where, f"one of the operators: {known}", f"operator.{name}", f"{cure}or add that operator"
    )


def _check_attributes(
    shape: Shape,
    nodes: Sequence[ast.AST],
    operators: Collection[str],
    prompts: Collection[str] | None,
    label: str,
) -> None:
    """Faults of `operator.NAME` and `prompt_custom.NAME` that do not exist."""
    rebound = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        where = f"{label}:{node.lineno}"
        if isinstance(node.value, ast.Name) and node.value.id in rebound:
            continue
        name = shape.operator_class(node)
        if name is not None and name not in (*operators, "Operator"):
            shape.faults.append(unknown_operator(name, operators, where))
        if (
            prompts is not None
            and node in shape.certain
            and isinstance(node.value, ast.Name)
            and shape.modules.get(node.value.id) == "prompt"
            and node.attr not in prompts
        ):
            near = difflib.get_close_matches(node.attr, prompts, 1)
            cure = f"did you mean {near[0]}?" if near else "add it to prompt.py or prompts.json"
            shape.faults.append(
                Fault(where, "a prompt of this graph", f"{node.value.id}.{node.attr}", cure)
            )
    for call in nodes:
        if (
            isinstance(call, ast.Call)
            and shape.operator_class(call.func) in operators
            and not call.args
            and not any(word.arg in ("llm", None) for word in call.keywords)
            and _constructs(shape, call)
        ):
            text = ast.unparse(call)
            cure = f"write {ast.unparse(call.func)}(self.llm)"
            shape.faults.append(
                Fault(f"{label}:{call.lineno}", "an operator with its model", f"{text:.80}", cure)
            )


def _constructs(shape: Shape, call: ast.Call) -> bool:
    """Whether a call builds an operator: a derived class may give the model itself."""
    return isinstance(call.func, ast.Attribute) or (
        isinstance(call.func, ast.Name) and shape.classes.get(call.func.id) == call.func.id
    )


def _workflow(shape: Shape, label: str) -> None:
    assert shape.tree is not None
    classes = {node.name: node for node in shape.tree.body if isinstance(node, ast.ClassDef)}
    name = "Workflow"
    for node in shape.tree.body:  # `Workflow = SolveGraph`
        if _assigned_names(node) == [name] and isinstance(node, ast.Assign):
            name = node.value.id if isinstance(node.value, ast.Name) else name
    shape.workflow = classes.get(name)
    if shape.workflow is None:
        found = f"classes {', '.join(classes)}" if classes else "no class"
        cure = "name the class that holds `async def __call__(self, problem)` Workflow"
        shape.faults.append(Fault(label, "a class Workflow", found, cure))
        return
    family = list(_family(shape.workflow, classes))
    init, call = _method(family, "__init__"), _method(family, "__call__")
    # A base class from elsewhere may have either.
    closed = all(isinstance(base, ast.Name) for node in family for base in node.bases) and all(
        base.id in (*classes, "object")
        for node in family
        for base in node.bases
        if isinstance(base, ast.Name)
    )
    if init is not None:
        _check_init(shape, init, label)
    elif closed:
        expected = "__init__(self, name, llm_config, dataset)"
        where = f"{label}:{shape.workflow.lineno}"
        shape.faults.append(Fault(where, expected, "a class without it", "add it"))
    if call is not None:
        _check_call(shape, call, label)
    elif closed:
        expected = "async def __call__(self, problem), or (self, problem, entry_point) for code"
        where = f"{label}:{shape.workflow.lineno}"
        shape.faults.append(Fault(where, expected, "a class without it", "add it"))


def _family(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    seen: set[str] = set()
    queue = [node]
    while queue:
        here = queue.pop(0)
        if here.name in seen:
            continue
        seen.add(here.name)
        yield here
        queue += [
            classes[base.id]
            for base in here.bases
            if isinstance(base, ast.Name) and base.id in classes
        ]


def _method(family: Sequence[ast.ClassDef], name: str) -> Function | None:
    for node in family:
        for member in node.body:
            if isinstance(member, Function) and member.name == name:
                return member
    return None


def workflow_methods(shape: Shape) -> dict[str, Function]:
    """The methods of the workflow by name, those of its bases in the same file included."""
    if shape.tree is None or shape.workflow is None:
        return {}
    classes = {node.name: node for node in shape.tree.body if isinstance(node, ast.ClassDef)}
    methods: dict[str, Function] = {}
    for node in _family(shape.workflow, classes):
        for member in node.body:
            if isinstance(member, Function):
                methods.setdefault(member.name, member)
    return methods


def _check_init(shape: Shape, init: Function, label: str) -> None:
    arguments = init.args
    names = [item.arg for item in (*arguments.args[1:], *arguments.kwonlyargs)]
    missing = [] if arguments.kwarg else [name for name in INIT_ARGUMENTS if name not in names]
    wanting = [name for name in _required(init) if name not in INIT_ARGUMENTS]
    if missing or wanting or arguments.posonlyargs:
        expected = "__init__(self, name, llm_config, dataset)"
        found = ast.unparse(arguments)
        shape.faults.append(
            Fault(f"{label}:{init.lineno}", expected, f"__init__({found})", "take those arguments")
        )


def _check_call(shape: Shape, call: Function, label: str) -> None:
    arguments = call.args
    positional = [item.arg for item in (*arguments.posonlyargs, *arguments.args)][1:]
    required = _required(call)
    keyword_only = [item.arg for item in arguments.kwonlyargs if item.arg in required]
    fits = (positional or arguments.vararg) and not keyword_only and len(required) <= 2
    if not fits or isinstance(call, ast.FunctionDef):
        expected = "async def __call__(self, problem), or (self, problem, entry_point) for code"
        kind = "def" if isinstance(call, ast.FunctionDef) else "async def"
        found = f"{kind} __call__({ast.unparse(arguments)})"
        shape.faults.append(Fault(f"{label}:{call.lineno}", expected, found, "write that line"))
    shape.parameters = tuple(positional[:2])
    shape.needs_entry_point = len(required) == 2


def _required(function: Function) -> list[str]:
    """Names of parameters without a default, self apart."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    given = len(positional) - len(arguments.defaults)
    names = [item.arg for item in positional[:given]][1:]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return names + [item.arg for item, default in pairs if default is None]


def _built(shape: Shape, nodes: Sequence[ast.AST]) -> Iterator[BuiltOperator]:
    """Every place where an operator is built, with the name of what it is assigned to."""
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and shape.operator_class(node.func) is not None
    ]
    at_once = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    named = {id(call): call for call in calls if id(call) not in at_once}
    names: dict[int, str] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _name_calls(target, node.value, named, names)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            _name_calls(node.target, node.value, named, names)
    counts: dict[str, int] = {}
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        operator = shape.operator_class(call.func) or ""
        name = names.get(id(call))
        if name is None:
            counts[operator] = counts.get(operator, 0) + 1
            name = f"{operator.lower()}_{counts[operator]}"
        yield BuiltOperator(name, operator, call.lineno, call.col_offset)


def _name_calls(
    target: ast.expr, value: ast.expr, wanted: Mapping[int, ast.expr], names: dict[int, str]
) -> None:
    """Give the wanted calls inside `value` the name of `target`."""
    if (
        isinstance(target, (ast.Tuple, ast.List))
        and isinstance(value, (ast.Tuple, ast.List))
        and len(target.elts) == len(value.elts)
    ):
        for one, other in zip(target.elts, value.elts, strict=True):
            _name_calls(one, other, wanted, names)
        return
    if isinstance(target, ast.Attribute):
        name = target.attr
    elif isinstance(target, ast.Name):
        name = target.id
    else:
        return
    if not any(_within(call, value) for call in wanted.values()):
        return
    found = [node for node in ast.walk(value) if id(node) in wanted]
    for number, node in enumerate(found, 1):
        names.setdefault(id(node), name if len(found) == 1 else f"{name}_{number}")


def _within(node: ast.expr, other: ast.expr) -> bool:
    """Whether one expression stands inside another, by their places."""
    start, end = (other.lineno, other.col_offset), (other.end_lineno, other.end_col_offset)
    return start <= (node.lineno, node.col_offset) < end
