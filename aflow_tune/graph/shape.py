"""What static analysis finds in a graph's source: its workflow, operators, prompts and faults.

Unknown operators, and unknown imports outside `try`, are faults wherever they stand; a missing
prompt only where every execution reaches it. The source is parsed, never compiled or imported.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import Fault
from aflow_tune.graph import inside

MAX_SOURCE_CHARS = 256 * 1024
"""Of one file, to bound the parser's memory. A graph is a page or two."""
_INIT_ARGUMENTS = {"name", "llm_config", "dataset"}
_INIT = "__init__(self, name, llm_config, dataset)"
_CALL = "async def __call__(self, problem), or (self, problem, entry_point) for code"
_IMPORTS = "the graph's prompts and operators, AFlow's names, or a module that is installed"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[ast.AST, str]  # a node of a source, and the text to replace it with


@dataclass(frozen=True)
class BuiltOperator:
    """One place in graph.py where an operator is built, as `operator.Custom(self.llm)`."""

    instance: str  # what it is assigned to, else the class's name and a number
    operator: str
    line: int
    column: int


class Shape:
    """The findings in one graph. Empty if the source could not be parsed."""

    def __init__(self, files: Mapping[str, str], operators: Collection[str], label: str) -> None:
        self.files, self.known, self.label = files, operators, label
        self.operators: tuple[BuiltOperator, ...] = ()
        self.parameters: tuple[str, ...] = ()  # the first two of `__call__`, without self
        self.needs_entry_point = False
        self.constants: dict[str, str] = {}  # texts that prompt.py assigns at its top level
        self.tree: ast.Module | None = None  # without the body of `if __name__ == "__main__":`
        self.certain: set[ast.AST] = set()
        """Nodes that every execution reaches: only there a missing prompt is a fault."""
        self.workflow: ast.ClassDef | None = None
        self.classes: dict[str, str] = {}  # operator by name of a class in graph.py
        self.modules = {"operator": "operator", "prompt_custom": "prompt"}
        """Shim (`inside.shim_of`) by name of an imported module of AFlow."""
        self.faults: list[Fault] = []

    @property
    def instances(self) -> dict[str, str]:
        """Instance name to operator name, in the order of the source."""
        return {built.instance: built.operator for built in self.operators}

    def operator_class(self, node: ast.expr) -> str | None:
        """The operator that an expression names as a class, such as `operator.Custom`."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name):
            module = self.modules.get(node.value.id)
        else:
            module = inside.shim_of(ast.unparse(node.value))
        return node.attr if module == "operator" else None

    def fault(self, node: ast.stmt | ast.expr, expected: str, found: str, fix: str) -> None:
        self.faults.append(Fault(f"{self.label}:{node.lineno}", expected, found, fix))

    def read(self, tree: ast.Module, prompts: Collection[str] | None) -> None:
        """Fill in everything. `prompts`: names of all prompt constants; None if unknown."""
        self.tree = _without_main(tree)
        self.nodes = walk(tree)
        tries = [node for node in self.nodes if isinstance(node, ast.Try)]
        optional = {id(node) for block in tries for part in block.body for node in ast.walk(part)}
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imported(node, id(node) not in optional)
        for statement in tree.body:
            for base in statement.bases if isinstance(statement, ast.ClassDef) else ():
                if (kind := self.operator_class(base)) is not None:
                    self.classes[statement.name] = kind  # type: ignore[attr-defined]
        self.certain = _certain(tree)
        self.attributes(prompts)
        self.read_workflow(tree)
        self.operators = tuple(self.built())

    def imported(self, node: ast.Import | ast.ImportFrom, must: bool) -> None:
        """Note the names that an import binds. `must`: outside `try`, where failing is a fault."""
        module = inside.absolute(getattr(node, "module", None) or "", getattr(node, "level", 0))
        kind = inside.shim_of(module) if isinstance(node, ast.ImportFrom) else None
        offered = inside.NAMES_OF.get(kind or "")
        for alias in node.names:
            name, bound = alias.name, alias.asname or alias.name
            if kind == "operator":
                if name == "*":
                    self.classes.update({known: known for known in self.known})
                elif self.is_operator(node, name):
                    self.classes[bound] = name
                continue
            if offered and name not in (*offered, "*"):
                expected = f"one of: {', '.join(offered)}"
                self.fault(node, expected, f"{name} from {module}", "use those")
                continue
            source, shim = module, kind
            if isinstance(node, ast.Import):
                source, shim = name, inside.shim_of(name)
                if alias.asname or "." not in name:
                    self.modules.pop(bound, None)
                    self.modules |= {} if shim is None else {bound: shim}
            elif kind is None and (inner := inside.shim_of(f"{module}.{name}")) is not None:
                source, shim = f"{module}.{name}", inner
                self.modules[bound] = inner
            top = source.partition(".")[0]
            foreign = top in inside.FOREIGN_PACKAGES or source.startswith("workflows.")
            if shim is not None or not must:
                continue
            if foreign or (top not in sys.stdlib_module_names and not _is_installed(top)):
                self.fault(node, _IMPORTS, f"import of {source}", "install it, or do without it")

    def is_operator(self, node: ast.stmt | ast.expr, name: str) -> bool:
        """Whether there is an operator of this name; a fault if not."""
        if name in (*self.known, "Operator"):
            return True
        expected = f"one of the operators: {', '.join(sorted(self.known))}"
        self.fault(node, expected, f"operator.{name}", nearest(name, self.known, "add it"))
        return False

    def attributes(self, prompts: Collection[str] | None) -> None:
        """Find faults of `operator.NAME`, `prompt_custom.NAME` and operators without a model."""
        names = [node for node in self.nodes if isinstance(node, ast.Name)]
        rebound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                name = self.operator_class(node)
                if owner in rebound or (name is not None and not self.is_operator(node, name)):
                    continue
                is_prompt = self.modules.get(owner) == "prompt" and node in self.certain
                if prompts is not None and is_prompt and node.attr not in prompts:
                    fix = nearest(node.attr, prompts, "add it to prompt.py or prompts.json")
                    self.fault(node, "a prompt of this graph", f"{owner}.{node.attr}", fix)
            elif isinstance(node, ast.Call) and not node.args:
                name = self.operator_class(node.func)
                # A class derived from an operator may pass the model itself.
                own = isinstance(node.func, ast.Name) and node.func.id != name
                given = any(word.arg in ("llm", None) for word in node.keywords)
                if name in self.known and not own and not given:
                    fix = f"write {ast.unparse(node.func)}(self.llm)"
                    found = f"{ast.unparse(node):.80}"
                    self.fault(node, "an operator with its model", found, fix)

    def read_workflow(self, tree: ast.Module) -> None:
        """Find the class Workflow and check the signatures of its two methods."""
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        name = "Workflow"
        for node in tree.body:  # `Workflow = SolveGraph`
            if _assigned_names(node) == [name] and isinstance(node, ast.Assign):
                name = node.value.id if isinstance(node.value, ast.Name) else name
        workflow = self.workflow = classes.get(name)
        if workflow is None:
            found = f"classes {', '.join(classes)}" if classes else "no class"
            fix = "name the class that holds `async def __call__(self, problem)` Workflow"
            self.faults.append(Fault(self.label, "a class Workflow", found, fix))
            return
        bases = [base for node in _family(workflow, classes) for base in node.bases]
        closed = all(getattr(base, "id", "") in (*classes, "object") for base in bases)
        methods = workflow_methods(self)
        if (init := methods.get("__init__")) is not None:
            arguments = init.args
            names = {item.arg for item in (*arguments.args[1:], *arguments.kwonlyargs)}
            lacks = not arguments.kwarg and not names >= _INIT_ARGUMENTS
            if lacks or not {*_required(init)} <= _INIT_ARGUMENTS or arguments.posonlyargs:
                found = f"__init__({ast.unparse(arguments)})"
                self.fault(init, _INIT, found, "take those arguments")
        if (call := methods.get("__call__")) is not None:
            arguments, required = call.args, _required(call)
            positional = [item.arg for item in (*arguments.posonlyargs, *arguments.args)][1:]
            keyword_only = {item.arg for item in arguments.kwonlyargs} & {*required}
            fits = (positional or arguments.vararg) and not keyword_only and len(required) <= 2
            if not fits or isinstance(call, ast.FunctionDef):
                kind = "def" if isinstance(call, ast.FunctionDef) else "async def"
                found = f"{kind} __call__({ast.unparse(arguments)})"
                self.fault(call, _CALL, found, "write that line")
            self.parameters = tuple(positional[:2])
            self.needs_entry_point = len(required) == 2
        for method, expected in (("__init__", _INIT), ("__call__", _CALL)):
            if closed and method not in methods:  # else an imported base class may have it
                self.fault(workflow, expected, "a class without it", "add it")

    def built(self) -> Iterator[BuiltOperator]:
        """Every place where an operator is built, named after its assignment target."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        at_once = {id(node.func) for node in calls}
        calls = [node for node in calls if self.operator_class(node.func) is not None]
        wanted = {id(call) for call in calls if id(call) not in at_once}
        names: dict[int, str] = {}
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    _name_calls(target, node.value, wanted, names)
        counts: dict[str, int] = {}
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            operator = self.operator_class(call.func) or ""
            name = names.get(id(call))
            if name is None:
                counts[operator] = counts.get(operator, 0) + 1
                name = f"{operator.lower()}_{counts[operator]}"
            yield BuiltOperator(name, operator, call.lineno, call.col_offset)


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """'did you mean X?' for the nearest known name, else `otherwise`."""
    near = difflib.get_close_matches(name, [*known], 1)
    return f"did you mean {near[0]}?" if near else otherwise


def parse(source: str, label: str) -> tuple[ast.Module | None, list[Fault]]:
    """The syntax tree of a file, or the faults that prevent it. `label` names it in messages."""
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
        label = f"{label}:{error.lineno}" if error.lineno else label
    except (ValueError, RecursionError, MemoryError) as error:
        found = f"{type(error).__name__}: {error}"
    return None, [Fault(label, "Python source", found, "correct the file")]


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The source with nodes replaced by texts. A statement replaced by '' becomes `pass` if its
    line holds other code."""
    # The parser's columns count bytes, and `bytes.splitlines` ends lines where the parser does.
    lines = source.encode().splitlines(keepends=True)
    places = [(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, t) for n, t in edits]  # type: ignore[attr-defined]
    for line, column, end_line, end_column, text in sorted(places)[::-1]:
        before, after = lines[line - 1][:column], lines[end_line - 1][end_column:]
        if not text and (before or after.partition(b"#")[0].strip()):
            text = "pass"
        lines[line - 1 : end_line] = [before + text.encode() + after]
    return b"".join(lines).decode()


def examine(
    files: Mapping[str, str], operators: Collection[str], prompts: Collection[str], label: str
) -> Shape:
    """Analyse a graph from its `files` by name; its faults are in `Shape.faults`.

    Args:
        operators: names of the operators that exist.
        prompts: names of prompt constants that are given besides prompt.py.
        label: how messages name the folder.
    """
    shape = Shape(files, operators, f"{label}/{inside.GRAPH_FILE}")
    tree, shape.faults = parse(files[inside.GRAPH_FILE], shape.label)
    shape.constants, complete, faults = _constants(files, label)
    shape.faults += faults
    if tree is not None:
        try:
            shape.read(tree, {*shape.constants, *prompts} if complete else None)
        except RecursionError:
            found = "an expression nested too deeply"
            fault = Fault(shape.label, "a readable graph", found, "split the expression")
            shape.faults.append(fault)
    return shape


def constants(source: str) -> dict[str, str]:
    """The texts that a prompt.py assigns; empty if it cannot be parsed."""
    return _constants({inside.PROMPT_FILE: source}, "")[0]


def _constants(files: Mapping[str, str], label: str) -> tuple[dict[str, str], bool, list[Fault]]:
    """The texts of prompt.py, whether these are all of its names, and its faults."""
    if inside.PROMPT_FILE not in files:
        return {}, True, []
    tree, faults = parse(files[inside.PROMPT_FILE], f"{label}/{inside.PROMPT_FILE}")
    texts: dict[str, str] = {}
    complete = tree is not None
    for node in tree.body if tree is not None else ():
        names = _assigned_names(node)
        value = getattr(node, "value", None)
        text = value.value if isinstance(value, ast.Constant) else None
        if names is not None:
            texts |= dict.fromkeys(names, text if isinstance(text, str) else "")
        elif not isinstance(node, ast.Expr) or not isinstance(text, str):
            complete = False  # any other statement may define names
    return texts, complete, faults


def _assigned_names(node: ast.stmt) -> list[str] | None:
    targets: Sequence[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if targets and len(names) == len(targets) else None


def _is_installed(top: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(top) is not None
    return False


def _family(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class and its bases in the same file."""
    family = [node]
    for here in family:
        bases = [classes[base.id] for base in here.bases if getattr(base, "id", "") in classes]  # type: ignore[attr-defined]
        family += [base for base in dict.fromkeys(bases) if base not in family]
    return family


def workflow_methods(shape: Shape) -> dict[str, Function]:
    """The methods of the workflow by name, those of its bases in the same file included."""
    if shape.tree is None or shape.workflow is None:
        return {}
    classes = {node.name: node for node in shape.tree.body if isinstance(node, ast.ClassDef)}
    members = [item for node in _family(shape.workflow, classes) for item in node.body]
    return {item.name: item for item in members[::-1] if isinstance(item, Function)}


def _required(function: Function) -> list[str]:
    """Names of parameters without a default, except self."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    given = len(positional) - len(arguments.defaults)
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    plain = [item.arg for item in positional[:given]][1:]
    return plain + [item.arg for item, default in pairs if default is None]


def _name_calls(
    target: ast.expr, value: ast.expr, wanted: Collection[int], names: dict[int, str]
) -> None:
    """Name the wanted calls inside `value` after `target`."""
    displays = (ast.Tuple, ast.List)
    if isinstance(target, displays) and isinstance(value, displays):
        if len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                _name_calls(one, other, wanted, names)
    elif isinstance(target, (ast.Attribute, ast.Name)):
        name = target.attr if isinstance(target, ast.Attribute) else target.id
        found = [node for node in ast.walk(value) if id(node) in wanted]
        for number, node in enumerate(found, 1):
            names.setdefault(id(node), name if len(found) == 1 else f"{name}_{number}")


# Contexts of names and operator signs are half of a tree and never matter here.
_PASSED_OVER = (
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.type_ignore
)  # fmt: skip
_NO_CHILDREN = {
    *(kind for base in _PASSED_OVER for kind in base.__subclasses__()),
    str, int, float, complex, bytes, bool, type(None), type(...),
}  # fmt: skip
"""Types of what fields hold beside children: half of the time of an analysis is spent here."""


def children(node: ast.AST) -> list[ast.AST]:
    """The child nodes in the order of `ast.iter_child_nodes`, without `_PASSED_OVER`."""
    found: list[ast.AST] = []
    for name in node._fields:
        value: Any = getattr(node, name, None)
        kind = type(value)
        if kind is list:
            found += [item for item in value if type(item) not in _NO_CHILDREN]
        elif kind not in _NO_CHILDREN:
            found.append(value)
    return found


def walk(tree: ast.AST) -> list[ast.AST]:
    """All nodes in the order of `ast.walk`, without `_PASSED_OVER`."""
    nodes = [tree]
    for node in nodes:
        nodes += children(node)
    return nodes


def levels(tree: ast.AST, most_nodes: int, most_depth: int) -> tuple[list[ast.AST], int]:
    """As `walk`, and the depth of the tree; stops early once past one of the limits."""
    nodes: list[ast.AST] = []
    level: Sequence[ast.AST] = [tree]
    depth = 0
    while level and len(nodes) <= most_nodes and depth <= most_depth:
        nodes += level
        depth += 1
        level = [child for node in level for child in children(node)]
    return nodes, depth


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Every parameter of a function, `*args` and `**kwargs` last."""
    rest = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]


def _without_main(tree: ast.Module) -> ast.Module:
    """Remove, in place, what does not run when a graph is imported.

    That is the body of `if __name__ == "__main__":` and the bodies of functions that only it uses;
    their defaults and decorators stay, as they are still evaluated.
    """
    left_out: list[ast.AST] = []
    body: list[ast.stmt] = []
    for node in tree.body:
        tests = ("__name__ == '__main__'", "'__main__' == __name__")
        if isinstance(node, ast.If) and ast.unparse(node.test) in tests:
            left_out += node.body
            body += node.orelse
        else:
            body.append(node)
    tree.body = body

    def names_in(nodes: Iterable[ast.AST]) -> set[str]:
        return {item.id for node in nodes for item in walk(node) if isinstance(item, ast.Name)}

    while left_out:
        named, read = names_in(left_out), names_in([tree])
        left_out = []
        for function in tree.body:
            if isinstance(function, Function) and function.name in named - read:
                left_out += [item for item in function.body if not isinstance(item, ast.Pass)]
                function.body = [ast.copy_location(ast.Pass(), function.body[0])]
    return tree


_ALWAYS = {
    ast.If: "test", ast.While: "test", ast.IfExp: "test", ast.Try: "finalbody",
    ast.Match: "subject", ast.Lambda: "args",
}  # fmt: skip
"""The part of a node that is reached whenever the node is."""
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def _certain(tree: ast.Module) -> set[ast.AST]:
    """The nodes that every execution reaches unless it fails before: not those in branches, after
    a branch that may leave, or in functions that are only called from such places.
    """
    functions = {node.name: node for node in walk(tree) if isinstance(node, Function)}
    found: set[ast.AST] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            pending += _reached(functions[name].body) if name in functions else []
        body = getattr(node, "body", None)
        if type(node) in _ALWAYS:
            part = getattr(node, _ALWAYS[type(node)])
            pending += part if isinstance(part, list) else [part]
        elif isinstance(node, ast.BoolOp):
            pending += node.values[:1]
        elif isinstance(node, Function):
            pending += [*node.decorator_list, node.args]
            pending += _reached(node.body) if node.name in ("__init__", "__call__") else []
        elif isinstance(body, list):
            pending += [part for part in children(node) if part not in body]
            pending += _reached(body)
        else:
            pending += children(node)
    return found


def _reached(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements up to the first that may leave the block."""
    for statement in body:
        yield statement
        if any(isinstance(part, _LEAVING) for part in walk(statement)):
            return
