"""Objects of a script that pickling by itself cannot send, or sends by a name that no worker knows.

A script's functions and classes travel by value; these, which scripts make beside them, have to
do so too. In Ray's pickler alone, which sends the functions: others go on as they are. Ray looks
for a reducer when it sends an object, and its classes know none of ours where it arrives: what a
reducer names has to be importable there.
"""

from __future__ import annotations

import contextvars
import functools
import typing
import weakref
from collections.abc import Callable
from typing import Any, NewType, ParamSpec, TypeVarTuple

from ray import cloudpickle

from aflow_tune.shipping.reach import MAIN, is_by_value

Function = Callable[..., Any]


def stays(module: str | None) -> bool:
    """Whether no worker has this module: what is in it is sent by value."""
    return module == MAIN or module in cloudpickle.list_registry_pickle_by_value()


def _cache(function: Any) -> Any:
    """What `functools.cache` made has no name on a worker, where the cache starts empty."""
    if not (is_by_value(function) or stays(function.__module__)):
        return function.__reduce__()
    kept = function.cache_parameters()
    return _cached, (function.__wrapped__, kept["maxsize"], kept["typed"])


def _cached(function: Function, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _cached_property(prop: Any) -> Any:
    """One of a class that is sent; its lock stays here."""
    return _property, (prop.func, prop.attrname)


def _property(function: Function, name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name  # Python gives it where a class is defined, not where one is put together
    return made


def _weak_keys(kept: Any) -> Any:
    """`functools.singledispatch` remembers in one what it found for each class."""
    return type(kept), (dict(kept),)


def _context_variable(variable: contextvars.ContextVar[Any]) -> Any:
    """With its default; what is set here belongs to this process."""
    try:
        default = contextvars.Context().run(variable.get)
    except LookupError:
        return contextvars.ContextVar, (variable.name,)
    return _with_default, (variable.name, default)


def _with_default(name: str, default: Any) -> Any:
    return contextvars.ContextVar(name, default=default)


def _new_type(kind: Any) -> Any:
    """Annotations of sent functions refer to it, as they do to parameters."""
    by_value = stays(kind.__module__) or "<locals>" in kind.__qualname__
    if not by_value:
        return kind.__reduce__()
    return _of_module, (NewType, kind.__module__, kind.__name__, kind.__supertype__)


def _parameter(kind: Any) -> Any:
    """A `ParamSpec` or `TypeVarTuple`; those of a script have neither bound nor variance."""
    if not stays(kind.__module__):
        return kind.__reduce__()
    return _of_module, (type(kind), kind.__module__, kind.__name__)


def _of_module(make: Function, module: str, *arguments: Any) -> Any:
    """What is made here tells where it was written, so that it can be sent on."""
    made = make(*arguments)
    made.__module__ = module
    return made


cloudpickle.CloudPickler.dispatch_table.update(
    {
        functools._lru_cache_wrapper: _cache,
        functools.cached_property: _cached_property,
        weakref.WeakKeyDictionary: _weak_keys,
        contextvars.ContextVar: _context_variable,
        NewType: _new_type,
        ParamSpec: _parameter,
        TypeVarTuple: _parameter,
        typing.ParamSpecArgs: lambda of: (typing.ParamSpecArgs, (of.__origin__,)),
        typing.ParamSpecKwargs: lambda of: (typing.ParamSpecKwargs, (of.__origin__,)),
    }
)
