"""Attributes and items in a written graph: what a name behind a dot or a key in brackets gives."""

from __future__ import annotations

import ast

from aflow_tune.graph import inside
from aflow_tune.writer.allowed import LOGGER, MODULES, NAME, public
from aflow_tune.writer.following.calls import AFLOW_LOGGER, PYTHON_LOGGER, Calls
from aflow_tune.writer.following.methods import RESULT_METHODS
from aflow_tune.writer.following.values import (
    BROKEN,
    NOTHING,
    PLAIN,
    TEXT,
    Atom,
    Broken,
    Config,
    Function,
    Handle,
    Method,
    Model,
    Module,
    Named,
    Obj,
    OperatorClass,
    Prompts,
    Ref,
    Result,
    Self,
    Text,
    Value,
    interval,
    joined,
)
from aflow_tune.writer.following.walking import SELF
from aflow_tune.writer.refusals import did_you_mean, listed, shown
from aflow_tune.writer.types import RefusalKind

MODEL_ATTRIBUTES = frozenset(name for name in dir(inside.Model) if not name.startswith("_")) | {
    "usage_tracker",
    "cost_manager",
}


class Items(Calls):
    """Attributes and items."""

    def _Attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(node)

    def attribute(self, node: ast.Attribute) -> Value:
        """`value.name`."""
        if node.attr == NAME:
            of_class = isinstance(node.value, ast.Attribute) and node.value.attr == "__class__"
            self.value(node.value.value if of_class else node.value)  # type: ignore[attr-defined]
            return TEXT
        owner = self.value(node.value)
        results = [
            found for atom in owner if (found := self._attribute_of(node, atom, owner)) is not None
        ]
        data = frozenset(atom for atom in owner if self._attribute_of_kind(atom) is None)
        if data:
            results.append(frozenset({Method(data, node.attr)}))
        return joined(NOTHING, *results) or BROKEN

    def attribute_if_there(self, value: Value, name: str) -> Value:
        """`getattr(value, name, default)`: what is there, without a refusal."""
        found = []
        for atom in value:
            if isinstance(atom, Self):
                found.append(self.here.variables.get((SELF, name), NOTHING))
                if name in self.functions:
                    found.append(frozenset({Function(self.functions[name], bound=True)}))
            elif isinstance(atom, Module) and atom.name == "prompt":
                found.append(TEXT)
            elif not isinstance(atom, (Handle, Model)):
                found.append(PLAIN)
        return joined(NOTHING, *found)

    def _attribute_of_kind(self, atom: Atom) -> str | None:
        """How the attributes of an atom are found; None for those of data."""
        if isinstance(atom, Named) and atom.name.startswith((PYTHON_LOGGER, AFLOW_LOGGER)):
            return atom.name
        for kind in (Self, Module, Model, Handle, Result, Broken, Config, Prompts):
            if isinstance(atom, kind):
                return kind.__name__
        return None

    def _attribute_of(self, node: ast.Attribute, atom: Atom, owner: Value) -> Value | None:
        name = node.attr
        if isinstance(atom, Broken):
            return BROKEN
        if isinstance(atom, Self):
            return self._of_self(node, name)
        if isinstance(atom, Module):
            return self._of_module(node, atom, name)
        if isinstance(atom, Model):
            if name in MODEL_ATTRIBUTES:
                return frozenset({Method(frozenset({atom}), name)})
            return self._no_attribute(node, "the model", name, MODEL_ATTRIBUTES)
        if isinstance(atom, Named) and atom.name.startswith((PYTHON_LOGGER, AFLOW_LOGGER)):
            if name in LOGGER or atom.name.startswith(AFLOW_LOGGER):
                return frozenset({Named(f"{atom.name}.{name}")})
            return self._no_attribute(node, "a logger", name, LOGGER)
        if isinstance(atom, Handle):
            if name == "name":
                return TEXT
            if name == "llm":
                return frozenset({Model()})
            message = (
                f"{atom.instance} is an operator and has no `{name}`; call it: "
                f"await {shown(node.value)}(...)"
            )
            return self.refuse(RefusalKind.UNKNOWN_NAME, message, node)
        if isinstance(atom, Result):
            return self._of_result(node, atom, name)
        if isinstance(atom, Prompts):
            return frozenset({Method(frozenset({atom}), name)})
        if isinstance(atom, Config):
            return frozenset({Method(PLAIN, name)})
        if isinstance(atom, Text) and len(owner) == 1 and not hasattr(str, name):
            return self._no_attribute(node, "a text", name, dir(str))
        if isinstance(atom, Ref):
            obj = self.here.heap.get(atom)
            if obj is not None and obj.kind == "pending" and len(owner) == 1:
                self.settled(owner, node)
                return BROKEN
        return None

    def _no_attribute(self, node: ast.AST, what: str, name: str, known: object) -> Value:
        names = [item for item in known if not item.startswith("_")]  # type: ignore[attr-defined]
        message = f"{what} has no `{name:.60}`{did_you_mean(name, names)}"
        return self.refuse(RefusalKind.UNKNOWN_NAME, message, node)

    def _of_self(self, node: ast.Attribute, name: str) -> Value:
        if name == "prompts" and (SELF, name) not in self.here.variables:
            return frozenset({Prompts()})
        found = self.here.variables.get((SELF, name))
        if found is not None:
            return found
        if name in self.functions:
            function = self.functions[name]
            static = any(
                isinstance(item, ast.Name) and item.id == "staticmethod"
                for item in function.decorator_list
            )
            return frozenset({Function(function, bound=not static)})
        if name in self.attributes:
            return PLAIN
        known = [*sorted(self.attributes), *self.functions]
        near = did_you_mean(name, known)
        operator = next(
            (item for item in self.operators if item.casefold() == name.replace("_", "")), ""
        )
        cure = f"write self.{name} = operator.{operator}(self.llm)" if operator else "assign it"
        message = f"self.{name} is never assigned{near}; {cure} in __init__"
        return self.refuse(RefusalKind.UNKNOWN_NAME, message, node)

    def _of_module(self, node: ast.Attribute, module: Module, name: str) -> Value:
        if not module.shim:
            return self._of_python(node, module.name, name)
        if module.name == "operator":
            return self.operator_named(node, name)
        if module.name == "prompt":
            return self.prompt_named(node, name, f"{shown(node.value)}.{name}")
        if module.name.startswith("package:"):
            dotted = f"{module.name.removeprefix('package:')}.{name}"
            kind = inside.shim_of(dotted)
            return frozenset({Module(kind or f"package:{dotted}", shim=True)})
        return self.shim_name(node, module.name, name)

    def shim_name(self, node: ast.AST, kind: str, name: str) -> Value:
        """A name of one of AFlow's modules."""
        if name not in inside.NAMES_OF.get(kind, ()):
            return self._no_attribute(node, "this module", name, inside.NAMES_OF.get(kind, ()))
        known = kind in ("model", "cost", "log")
        return frozenset({Named(f"{kind}.{name}")}) if known else PLAIN

    def operator_named(self, node: ast.AST, name: str) -> Value:
        """`operator.NAME`."""
        if name in self.operators:
            return frozenset({OperatorClass(name)})
        message = (
            f"there is no operator {name:.60}{did_you_mean(name, self.operators)}; "
            f"a graph may use {listed(self.operators, 30)}"
        )
        return self.refuse(RefusalKind.UNKNOWN_OPERATOR, message, node)

    def prompt_named(self, node: ast.AST, name: str, text: str) -> Value:
        """`prompt_custom.NAME` or `self.prompts["NAME"]`."""
        self.used_prompts.add(name)
        if name in self.prompts:
            return frozenset({Text(len(self.prompts[name]))})
        if self.any_prompt or name in self.own_prompts or node not in self.shape.certain:
            return TEXT  # a run that comes here without it says so
        message = (
            f"{text:.60} has no text{did_you_mean(name, self.prompts)}; write one under "
            f'`prompts` as "{name:.60}"'
        )
        self.refuse(RefusalKind.PROMPT, message, node)
        return TEXT

    def _of_python(self, node: ast.AST, module: str, name: str) -> Value:
        dotted = f"{module}.{name}"
        if dotted in MODULES:
            return frozenset({Module(dotted)})
        if not public(module, name):
            names = MODULES[module]
            near = did_you_mean(name, names or ())
            message = f"{dotted:.80} is not allowed in a graph{near}"
            return self.refuse(RefusalKind.NOT_ALLOWED, message, node)
        return frozenset({Named(dotted)})

    def _of_result(self, node: ast.Attribute, result: Result, name: str) -> Value:
        if name in RESULT_METHODS:
            return frozenset({Method(frozenset({result}), name)})
        keys = self.keys_of(result)
        if name in keys:
            cure = f'write {shown(node.value)}["{name}"]'
        else:
            cure = f"its keys are {listed(keys)}{did_you_mean(name, keys)}"
        message = f"the result of {result.operator} is a dictionary; {cure}"
        return self.refuse(RefusalKind.UNKNOWN_NAME, message, node)

    def _Subscript(self, node: ast.Subscript) -> Value:
        owner = self.settled(self.value(node.value), node.value)
        if isinstance(node.slice, ast.Slice):
            return self._slice(node, owner, node.slice)
        index = self.settled(self.value(node.slice), node.slice)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.slice, ast.UnaryOp):
            low, high = interval(index)
            key = low if low == high else None
        results = [self._item(node, atom, key) for atom in owner if not isinstance(atom, Result)]
        results += self.keys_of_results(node, owner, key)
        return joined(NOTHING, *results) or BROKEN

    def _item(self, node: ast.Subscript, atom: Atom, key: object) -> Value:
        if isinstance(atom, Prompts):
            if isinstance(key, str):
                return self.prompt_named(node, key, f'self.prompts["{key}"]')
            return TEXT
        if isinstance(atom, Ref):
            obj = self.here.heap.get(atom, Obj("list", None, PLAIN))
            elements = obj.elements
            if obj.names is not None and elements is not None:
                at = obj.names.index(key) if key in obj.names else -1
                return elements[at] if at >= 0 else obj.items or PLAIN
            if type(key) is int and elements is not None and -len(elements) <= key < len(elements):
                return elements[key]
            return obj.items or PLAIN
        if isinstance(atom, Text):
            return frozenset({Text(1)})
        if isinstance(atom, (Broken, Handle)):
            return BROKEN if isinstance(atom, Broken) else frozenset({atom})
        return PLAIN

    def _slice(self, node: ast.Subscript, owner: Value, part: ast.Slice) -> Value:
        bounds = [
            interval(self.value(item)) if item is not None else None
            for item in (part.lower, part.upper, part.step)
        ]
        upper = bounds[1][1] if bounds[1] is not None and (bounds[1][0] or 0) >= 0 else None
        results: list[Value] = []
        for ref, obj in self.here.objects(owner):
            length = (
                obj.length
                if upper is None
                else min(upper, obj.length if obj.length is not None else upper)
            )
            results.append(self.new(node, Obj("list", length, obj.items or PLAIN), ref.site))
        for atom in owner:
            if isinstance(atom, Text):
                known = atom.length if upper is None else min(upper, atom.length or upper)
                results.append(frozenset({Text(known)}))
            elif not isinstance(atom, Ref):
                results.append(BROKEN if isinstance(atom, Broken) else PLAIN)
        return joined(NOTHING, *results) or BROKEN
