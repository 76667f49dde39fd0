"""What a workflow and a judge must look like: the tables that `signature.py` checks against.

Neither torch, Trinity nor AgentScope is imported: their classes are recognised by name, result
types by their fields.
"""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.contract.annotations import Meaning


@dataclass(frozen=True)
class Kind:
    """What may be written for one parameter."""

    expected: str
    admits: Callable[[Meaning], bool]
    """Whether one member of the annotation's union takes what is passed."""
    to_paste: Callable[[Mapping[str, Any]], str]
    """An annotation that is right in a module with these names."""


@dataclass(frozen=True)
class Contract:
    """The shape of one noun's functions."""

    noun: str
    usual: str
    essential: Mapping[str, Kind]
    optional: Mapping[str, Kind]
    returns: tuple[str, ...]
    """What the return annotation may be, as `result_name` calls it; the usual one first."""


_MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")
_MODELS = ("TrinityChatModel", "OpenAIChatModel", "ChatModelBase", "RunChatModel")
_FIELDS = {
    "WorkflowOutput": frozenset({"reward", "response", "metrics"}),
    "JudgeOutput": frozenset({"reward", "metrics"}),
}


def result_name(meaning: Meaning) -> str:
    """'float', 'WorkflowOutput', 'JudgeOutput', or another name, of what a function returns."""
    if not isinstance(meaning.type, type):
        return meaning.name
    if issubclass(meaning.type, float):
        return "float"
    fields = {name for owner in meaning.type.__mro__ for name in _annotated(owner)}
    for name, needed in _FIELDS.items():
        if needed <= fields:
            return name
    return f"{meaning.name} without reward and metrics" if meaning.name in _FIELDS else meaning.name


def why_not(meanings: Sequence[Meaning], accepted: Sequence[str]) -> str:
    """Why a return annotation with these members is none of those accepted."""
    names = [result_name(meaning) for meaning in meanings]
    fitting = [name for name in names if name in accepted]
    (first, *_) = names
    if "None" in names:
        return (
            "it may be None; a run that has no reward raises instead"
            if fitting
            else "a run without a reward teaches nothing"
        )
    if len(fitting) > 1:
        return "two forms; a function has one"
    if first in ("Awaitable", "Coroutine"):
        return "an `async def` is annotated with what awaiting it gives"
    if first in ("int", "bool"):
        return "a reward is a float"
    if first == "Any":
        return "it does not say which form"
    if first in _FIELDS:
        noun = "workflow" if first == "WorkflowOutput" else "judge"
        return f"that is what a {noun} returns"
    if not fitting and meanings[0].type is None:
        return "a name that the module does not define"
    return "another type"


def _annotated(owner: type) -> Mapping[str, Any]:
    annotations: Mapping[str, Any] = vars(owner).get("__annotations__", {})
    return annotations


def _admits_mapping(meaning: Meaning) -> bool:
    if meaning.type is None:
        fits = meaning.name in _MAPPINGS
    else:
        mappings = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
        fits = meaning.type in mappings or typing.is_typeddict(meaning.type)
    keys = meaning.args[0] if meaning.args else ()
    return fits and (not keys or any(key.name in ("str", "Any", "object") for key in keys))


def _admits_model(meaning: Meaning) -> bool:
    is_protocol = bool(getattr(meaning.type, "_is_protocol", False))
    return is_protocol or meaning.name in (*_MODELS, "Callable")


def _named(name: str) -> Callable[[Meaning], bool]:
    return lambda meaning: meaning.name == name


def _dict_to_paste(namespace: Mapping[str, Any]) -> str:
    return "Dict" if "Dict" in namespace else "dict"


def _model_to_paste(namespace: Mapping[str, Any]) -> str:
    return next((name for name in _MODELS if name in namespace), '"TrinityChatModel"')


_TASK = Kind(
    "Dict (or dict, Dict[str, Any], Mapping, MutableMapping, a TypedDict)",
    _admits_mapping,
    _dict_to_paste,
)
_AUXILIARY = Kind(
    "Dict[str, OpenAIChatModel] | None",
    _admits_mapping,
    lambda namespace: f"{_dict_to_paste(namespace)} | None",
)
_LOGGER = Kind("logging.Logger | None", _named("Logger"), lambda _: '"Logger | None"')

WORKFLOW = Contract(
    noun="workflow",
    usual="async def f(task: Dict, model: TrinityChatModel) -> float",
    essential={
        "task": _TASK,
        "model": Kind(
            "TrinityChatModel (or its bases OpenAIChatModel, ChatModelBase)",
            _admits_model,
            _model_to_paste,
        ),
    },
    optional={
        "auxiliary_models": _AUXILIARY,
        "logger": _LOGGER,
        "system_prompt": Kind("str | None", _named("str"), lambda _: "str | None"),
    },
    returns=("float", "WorkflowOutput"),
)
JUDGE = Contract(
    noun="judge",
    usual="async def f(task: Dict, response: Any) -> JudgeOutput",
    essential={"task": _TASK, "response": Kind("any type", lambda _: True, lambda _: "")},
    optional={"auxiliary_models": _AUXILIARY, "logger": _LOGGER},
    returns=("JudgeOutput",),
)
