"""Typed edits of a graph, without a model: each makes one change and keeps the rest of the source.

An edit of a *site* (one awaited call of an operator) replaces the call by an expression with the
same key in its result; an edit of the *whole* renames `__call__` and writes a new one around it.
What cannot be edited this way yields no edit. The static check decides whether a result may run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from aflow_tune.graph import inside
from aflow_tune.graph.flow import place_of
from aflow_tune.graph.graph import Graph, bare
from aflow_tune.graph.shape import Edit, Function, edited, parameters
from aflow_tune.operators import Operator
from aflow_tune.writer.source import is_self, returns_of
from aflow_tune.writer.templates import (
    PROBLEM_ARGUMENTS,
    TEMPLATES,
    answer_key,
    instance_name,
    parameters_of,
)

VOTES = 3
"""Samples of one call that a vote chooses from."""
_PASSED_ON = ("solution", "solutions", *PROBLEM_ARGUMENTS)
"""Arguments that can stand for a call's result when the call is removed, best first."""
_ENSEMBLES = ("ScEnsemble", "MdEnsemble")
_REFINING = ("Review", "Revise")
_GONE = "_gone_"
"""Stands for a statement whose line is then removed."""


@dataclass(frozen=True)
class Move:
    """One possible change of a graph, and its result. `what` names the change without its place, so
    that the same change of another graph has the same name."""

    kind: str
    what: str
    graph: Graph


@dataclass(frozen=True)
class _Site:
    node: ast.Await
    call: ast.Call
    instance: str
    operator: str


class Editor:
    """One graph, ready to be edited."""

    def __init__(self, graph: Graph, operators: Mapping[str, type[Operator]]) -> None:
        self.graph, self.operators = graph, operators
        self.source = graph.sources[inside.GRAPH_FILE]
        shape = graph.shape
        own = shape.workflow.body if shape.workflow is not None else []
        self.methods = {item.name: item for item in own if isinstance(item, Function)}
        self.init, self.call = self.methods.get("__init__"), self.methods.get("__call__")
        self.arguments = [item.arg for item in parameters(self.call.args)][1:] if self.call else []
        self.editable = self._is_editable()
        self.taken = (
            {*shape.instances, *self.methods}
            | {node.attr for node in shape.nodes if isinstance(node, ast.Attribute)}
            if shape.tree is not None
            else set()
        )

    def _is_editable(self) -> bool:
        if self.init is None or not isinstance(self.call, ast.AsyncFunctionDef):
            return False
        names = self.call.args
        plain = self.arguments and not (names.vararg or names.kwarg)
        named = [item.arg for item in parameters(names)][:1] == ["self"]
        return bool(plain and named and self.init.lineno < self.init.body[0].lineno)

    @cached_property
    def sites(self) -> list[_Site]:
        """The awaited calls that certainly reach one operator, in source order. Not those within
        an f-string, whose places Python 3.11 does not know."""
        found, nodes = [], self.graph.shape.nodes
        formatted = {
            part for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
        }
        for node in nodes:
            if node in formatted:
                continue
            if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
                handles = self.graph.flow.calls.get(place_of(node.value), frozenset())
                for instance, operator in handles if len(handles) == 1 else ():
                    if operator in self.operators and is_self(
                        getattr(node.value.func, "value", node)
                    ):
                        found.append(_Site(node, node.value, instance, operator))
        return found

    @cached_property
    def model(self) -> str:
        """The expression of the graph's model where operators are built."""
        for node in self.graph.shape.nodes:
            if (
                isinstance(node, ast.Call)
                and self.graph.shape.operator_class(node.func) is not None
            ):
                given = [*node.args, *(word.value for word in node.keywords if word.arg == "llm")]
                if given:
                    return ast.unparse(given[0])
        return "self.llm"

    # Edits of one call

    def swap(self, site: _Site, operator: str) -> Graph | None:
        """Another operator answers in place of this one."""
        name = self._fresh(instance_name(operator))
        made = self._asked(name, operator, self._text_of(site, PROBLEM_ARGUMENTS))
        key = answer_key(self.operators[site.operator])
        if made is None or key is None:
            return None
        text = f'{{"{key}": ({made})["{answer_key(self.operators[operator])}"]}}'
        return self._with([*self._unused(site), (site.node, text)], built={name: operator})

    def remove(self, site: _Site) -> Graph | None:
        """The call's input takes the place of its result; the last use of an instance goes too."""
        key = answer_key(self.operators[site.operator])
        for name in _PASSED_ON:
            text = self._text_of(site, (name,))
            if text is not None and key is not None:
                text = f"list({text})[0]" if name == "solutions" else text
                return self._with([*self._unused(site), (site.node, f'{{"{key}": {text}}}')])
        return None

    def refine(self, site: _Site) -> Graph | None:
        """The answer is reviewed and revised once."""
        problem = self._text_of(site, PROBLEM_ARGUMENTS)
        key = answer_key(self.operators[site.operator])
        if problem is None or key is None:
            return None
        review, revise, step = map(self._fresh, ("review", "revise", "refined"))
        method = (
            f"async def {step}(self, problem, solution):\n"
            f"    review = await self.{review}(problem=problem, solution=solution)\n"
            f"    revised = await self.{revise}(\n"
            f'        problem=problem, solution=solution, feedback=review["feedback"]\n'
            f"    )\n"
            f'    return revised["solution"]\n'
        )
        old = f'({self._source_of(site.node)})["{key}"]'
        text = f'{{"{key}": await self.{step}({problem}, {old})}}'
        return self._with(
            [(site.node, text)], built={review: "Review", revise: "Revise"}, method=method
        )

    def vote(self, site: _Site, ensemble: str) -> Graph | None:
        """Several samples of the call, of which an ensemble chooses."""
        problem = self._text_of(site, PROBLEM_ARGUMENTS)
        key = answer_key(self.operators[site.operator])
        if problem is None or key is None:
            return None
        name = self._fresh(instance_name(ensemble))
        samples = f'[({self._source_of(site.node)})["{key}"] for _ in range({VOTES})]'
        words = [f"solutions={samples}"]
        words += (
            [f"problem={problem}"] if "problem" in parameters_of(self.operators[ensemble]) else []
        )
        chosen = answer_key(self.operators[ensemble])
        text = f'{{"{key}": (await self.{name}({", ".join(words)}))["{chosen}"]}}'
        return self._with([(site.node, text)], built={name: ensemble})

    def instruct(self, instance: str, text: str) -> Graph | None:
        """One instance gets this instruction in place of its own."""
        if self.graph.instructions.get(instance, "") == text:
            return None
        told = {**self.graph.instructions, instance: text}
        return replace(
            self.graph, instructions={name: words for name, words in told.items() if words}
        )

    # Edits of the whole

    def split(self, joint: str) -> Graph | None:
        """A problem is cut in two at `joint`, each half is answered, the answers are joined."""
        if not self.editable or self._pairs is None:
            return None
        problem, *rest = self.arguments
        step, others = self._fresh("whole"), "".join(f", {name}" for name in rest)
        call = f"await self.{step}({{}}{others})"
        answer = f"{call}, 0" if not self._pairs else call
        return self._around(
            step,
            f"first, _, second = {problem}.partition({joint!r})",
            f"answer, cost = {answer.format('first')}",
            "if second:",
            f"    other, cost = {answer.format('second')}",
            '    answer = f"{answer} {other}"',
            "return answer, cost" if self._pairs else "return answer",
        )

    def graft(self, other: Graph, word: str) -> Graph | None:
        """Problems that contain `word` go to this graph, the rest to `other`."""
        foreign = Editor(other, self.operators)
        if not (self.editable and foreign.editable) or self.arguments != foreign.arguments:
            return None
        taken = {*self.taken}
        brought = foreign._as_methods(self._fresh("other"), taken)
        constants = {**self.graph.sources, **other.sources}
        shared = [constants.get(name) for name in (inside.PROMPT_FILE,)]
        if brought is None or any(shared) or self._pairs is None or self._pairs != foreign._pairs:
            return None
        names, methods = brought
        step, given = _free("whole", taken), ", ".join(self.arguments)
        built = {names[name]: kind for name, kind in other.shape.instances.items()}
        options = {names[name]: words for name, words in foreign._options.items()}
        told = {names.get(name, name): text for name, text in other.instructions.items()}
        prompts = {names.get(name, name): text for name, text in other.prompts.items()}
        joined = self._around(
            step,
            f"if {word!r} in {self.arguments[0]}.lower():",
            f"    return await self.{step}({given})",
            f"return await self.{names['__call__']}({given})",
            built=built,
            options=options,
            method=methods,
        )
        if joined is None:
            return None
        return replace(
            joined,
            instructions={**told, **joined.instructions},
            prompts={**prompts, **joined.prompts},
        )

    # The parts of edits

    @property
    def _pairs(self) -> bool | None:
        """Whether `__call__` returns an answer and a cost; None if only in places, or unknown."""
        assert self.call is not None
        values = [item.value for item in returns_of(self.call)]
        found: set[bool | None] = {
            isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in values
        }
        named = {value.id for value in values if isinstance(value, ast.Name)}
        for node in ast.walk(self.call):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                found |= {None for name in node.targets if getattr(name, "id", "") in named}
        return found.pop() if len(found) == 1 else None

    @property
    def _options(self) -> dict[str, str]:
        """By instance, what its construction is given besides the model, as source."""
        shape, options = self.graph.shape, {}
        calls = {
            (node.lineno, node.col_offset): node
            for node in shape.nodes
            if isinstance(node, ast.Call)
        }
        for built in shape.operators:
            words = calls[built.line, built.column].keywords
            told = "".join(f", {ast.unparse(word)}" for word in words if word.arg != "llm")
            options[built.instance] = told
        return options

    def _as_methods(self, name: str, taken: set[str]) -> tuple[dict[str, str], str] | None:
        """Its methods as source under names that are free, and the new name of each attribute;
        None if they need more of their graph than operators and the model."""
        shape = self.graph.shape
        own = {*shape.instances, *self.methods} - {"__init__"}
        names: dict[str, str] = {}
        for item in sorted(own):
            names[item] = _free(name if item == "__call__" else item, taken)
            taken.add(names[item])
        assert shape.tree is not None
        tree = ast.parse(self.source)
        plain = (ast.Import, ast.ImportFrom, ast.ClassDef)
        if not all(isinstance(node, plain) or _is_text(node) for node in tree.body):
            return None
        texts = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name != getattr(shape.workflow, "name", ""):
                return None
        workflow = next(node for node in tree.body if isinstance(node, ast.ClassDef))
        for method in workflow.body:
            if not isinstance(method, Function) or method.name == "__init__":
                continue
            for part in ast.walk(method):
                if isinstance(part, ast.Attribute) and is_self(part.value):
                    if part.attr not in own | {"llm", "prompts"}:
                        return None
                    part.attr = names.get(part.attr, part.attr)
            method.name = names[method.name]
            texts.append(ast.unparse(method) + "\n")
        return names, "\n".join(texts)

    def _text_of(self, site: _Site, names: Sequence[str]) -> str | None:
        """The source of the first of these arguments that a call has."""
        order = list(parameters_of(self.operators[site.operator]))
        starred = any(isinstance(item, ast.Starred) for item in site.call.args)
        given = dict(zip(order, site.call.args if not starred else (), strict=False))
        given |= {word.arg: word.value for word in site.call.keywords if word.arg}
        return next((self._source_of(given[name]) for name in names if name in given), None)

    def _asked(self, name: str, operator: str, text: str | None) -> str | None:
        """A call of an operator on a text; None if it needs more than the problem."""
        takes = parameters_of(self.operators[operator])
        problem = next((item for item in PROBLEM_ARGUMENTS if item in takes), None)
        if text is None or problem is None or answer_key(self.operators[operator]) is None:
            return None
        words = {problem: text}
        if "entry_point" in takes and "entry_point" in self.arguments:
            words["entry_point"] = "entry_point"
        if {item for item, required in takes.items() if required} - set(words):
            return None
        given = ", ".join(f"{key}={value}" for key, value in words.items())
        return f"await self.{name}({given})"

    def _source_of(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ast.unparse(node)

    def _fresh(self, name: str) -> str:
        return _free(name, self.taken)

    def _unused(self, site: _Site) -> list[Edit]:
        """The edit that removes the construction of an instance that only this site uses."""
        assert self.init is not None
        uses = [
            node
            for node in self.graph.shape.nodes
            if isinstance(node, ast.Attribute) and node.attr == site.instance
        ]
        for statement in self.init.body:
            if (
                isinstance(statement, ast.Assign)
                and statement.targets[0] in uses
                and len(uses) == 2
                and len(self.init.body) > 1
            ):
                return [(statement, _GONE)]
        return []

    def _with(
        self,
        edits: Sequence[Edit],
        built: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        method: str = "",
        renamed: str = "",
    ) -> Graph:
        """The graph with these edits, operators built at the end of `__init__`, and methods behind
        `__call__`, whose name becomes `renamed`."""
        if edits:  # what is inserted below has its place in the source that they make
            text = edited(self.source, edits)
            text = re.sub(rf"^[ \t]*{_GONE}\r?\n", "", text, flags=re.MULTILINE)
            text = text.replace(_GONE, "pass")  # its line holds more
            again = Editor(self._of(text), self.operators)
            again.__dict__["model"] = self.model  # it may have stood in what was removed
            return again._with([], built, options, method, renamed)
        assert self.init is not None
        assert self.call is not None
        lines = self.source.split("\n")
        last = self.init.body[-1]
        space, indent = (_indent(lines[node.lineno - 1]) for node in (self.call, last))
        told = options or {}
        new = [
            f"{indent}self.{name} = operator.{kind}({self.model}{told.get(name, '')})"
            for name, kind in (built or {}).items()
        ]
        behind = [""] + [space + line if line else "" for line in method.rstrip("\n").split("\n")]
        places = [
            (last.end_lineno or 0, new),
            (self.call.end_lineno or 0, behind if method else []),
        ]
        for at, inserted in sorted(places, reverse=True):
            lines[at:at] = inserted
        if renamed:
            head = self.call.lineno - 1 + (len(new) if self.init.lineno < self.call.lineno else 0)
            lines[head] = lines[head].replace("__call__", renamed, 1)
        return _pruned(self._of("\n".join(lines)))

    def _of(self, source: str) -> Graph:
        return replace(self.graph, sources={**self.graph.sources, inside.GRAPH_FILE: source})

    def _around(
        self,
        step: str,
        *body: str,
        built: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        method: str = "",
    ) -> Graph | None:
        """`__call__` becomes the method `step`, and a new `__call__` has this body."""
        assert self.call is not None
        if self.call.decorator_list:
            return None
        head = f"async def __call__({ast.unparse(self.call.args)}):"
        text = "\n".join([head, *(f"    {line}" for line in body), ""])
        return self._with([], built, options, f"{text}\n{method}" if method else text, renamed=step)


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number where it is taken; counts on from the number that it has."""
    stem = re.sub(r"_\d+$", "", name)
    if name not in taken:
        return name
    return next(f"{stem}_{n}" for n in range(2, 1000) if f"{stem}_{n}" not in taken)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _pruned(graph: Graph) -> Graph:
    """The graph without instructions for instances and operators that it no longer has."""
    if not graph.instructions:
        return graph
    there = {bare(name) for pair in graph.shape.instances.items() for name in pair}
    left = {name: text for name, text in graph.instructions.items() if bare(name) in there}
    return replace(graph, instructions=left) if len(left) < len(graph.instructions) else graph


def moves(
    graph: Graph,
    operators: Mapping[str, type[Operator]],
    *,
    instructions: Mapping[str, str],
    joints: Sequence[str] = (),
    problem_type: str | None = None,
    adopt: bool = False,
) -> Iterator[Move]:
    """Every typed edit of a graph with these operators but routers, in a fixed order.

    Args:
        instructions: texts for one instance, by a name for each.
        joints: texts at which a problem may be cut in two.
        adopt: whether shipped templates that fit `problem_type` may take its place.
    """
    if graph.shape.tree is None:
        return
    editor = Editor(graph, operators)
    found: list[tuple[str, str, Graph | None]] = []
    for instance, operator in graph.shape.instances.items():
        for name, text in instructions.items():
            made = editor.instruct(instance, text)
            found.append(("instruct", f"instruct {operator}: {name}", made))
    for site in editor.sites if editor.editable else ():
        own = site.operator
        for other in operators:
            if other != own:
                found.append(("swap", f"swap {own} for {other}", editor.swap(site, other)))
        for ensemble in _ENSEMBLES:
            if ensemble in operators and own not in _ENSEMBLES:
                made = editor.vote(site, ensemble)
                found.append(("vote", f"vote of {own} by {ensemble}", made))
        if {*_REFINING} <= {*operators} and own not in _REFINING:
            found.append(("refine", f"refine {own}", editor.refine(site)))
        if len(editor.sites) > 1:  # a workflow that asks nobody is refused
            found.append(("remove", f"remove {own}", editor.remove(site)))
    for joint in joints:
        found.append(("split", f"split at {joint!r}", editor.split(joint)))
    for template in TEMPLATES.values() if adopt else ():
        if template.fits(problem_type, operators):
            found.append(("adopt", f"adopt {template.name}", template.graph))
    for kind, what, result in found:
        if result is not None and not _same(result, graph):
            # Without what was found out about it: of many only a few are chosen.
            yield Move(kind, what, replace(result))


def _same(one: Graph, other: Graph) -> bool:
    parts = ("sources", "prompts", "instructions")
    return all(getattr(one, part) == getattr(other, part) for part in parts)


def ablations(graph: Graph, operators: Mapping[str, type[Operator]]) -> dict[str, Graph]:
    """By instance, the graph in which every call of it is replaced by its input."""
    found: dict[str, Graph] = {}
    for instance in graph.shape.instances:
        changed: Graph | None = graph
        while changed is not None:
            editor = Editor(changed, operators)
            site = next((one for one in editor.sites if one.instance == instance), None)
            if site is None:
                break
            changed = editor.remove(site) if editor.editable else None
        if changed is not None and changed is not graph:
            found[instance] = changed
    return found
