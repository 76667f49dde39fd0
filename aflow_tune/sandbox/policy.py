"""What `auto` means in a run: the configuration's `sandbox:`, carried by a context variable.

Operators, scoring and graphs take a policy of their own, `auto` by default; a policy that they
were given explicitly wins. A policy is the name of a wall, followed by the packages that programs
may import: `auto+numpy+sympy`. So one word says all of it wherever policies are handed on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.sandbox import packages
from aflow_tune.sandbox.types import Level

POLICIES = ("auto", *(level.value for level in Level))

_policy: ContextVar[str] = ContextVar("aflow_tune_sandbox_policy", default="auto")


@contextlib.contextmanager
def use_policy(policy: str) -> Iterator[None]:
    """Let `auto` mean this policy for the block and everything it starts. BadInput: unknown."""
    token = _policy.set(meant(policy))
    try:
        yield
    finally:
        # A run that was given up may be closed by the collector, in another context.
        with contextlib.suppress(ValueError):
            _policy.reset(token)


def meant(policy: str) -> str:
    """The policy that applies where this one was given. BadInput: there is no such policy."""
    wall, names = parts(policy)
    if wall not in POLICIES:
        raise BadInput(
            "unknown sandbox policy",
            [Fault("sandbox", f"one of {', '.join(POLICIES)}", repr(policy), "use auto")],
        )
    if wall != "auto":
        return policy
    wall, more = parts(_policy.get())
    return "+".join(dict.fromkeys((wall, *more, *names)))


def parts(policy: str) -> tuple[str, tuple[str, ...]]:
    """The wall and the packages of a policy."""
    wall, *names = policy.split("+")
    return wall, tuple(names)


def of_setting(value: Any) -> str:
    """The policy that `sandbox:` of a configuration means: a wall, or a mapping with `policy` and
    `packages`.

    Raises:
        BadInput: it is something else, or a package cannot be given to programs.
    """
    if isinstance(value, str):
        wall, names = parts(value)
    elif isinstance(value, Mapping) and not set(value) - {"policy", "packages"}:
        wall, names = value.get("policy", "auto"), value.get("packages") or ()
        if isinstance(names, str):
            names = (names,)
    else:
        expected = "one of " + ", ".join(POLICIES) + ", or {policy: auto, packages: [numpy]}"
        fault = Fault("sandbox", expected, f"{value!r:.80}", "write `sandbox: auto`")
        raise BadInput("There is no such sandbox.", [fault])
    if wall not in POLICIES:
        expected = "one of " + ", ".join(POLICIES)
        fault = Fault("sandbox.policy", expected, repr(wall), "write `auto`")
        raise BadInput("There is no such sandbox.", [fault])
    packages.find(tuple(names), "sandbox.packages")
    return "+".join(dict.fromkeys((wall, *names)))
