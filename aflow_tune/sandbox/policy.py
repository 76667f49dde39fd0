"""What `auto` means in a run: the configuration's `sandbox:`, carried by a context variable.

Operators, scoring and graphs take a policy of their own, `auto` by default; a policy that they
were given explicitly wins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from aflow_tune.errors import BadInput, Fault
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
    if policy not in POLICIES:
        raise BadInput(
            "unknown sandbox policy",
            [Fault("sandbox", f"one of {', '.join(POLICIES)}", repr(policy), "use auto")],
        )
    return _policy.get() if policy == "auto" else policy
