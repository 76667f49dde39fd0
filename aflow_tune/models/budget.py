"""A hard budget in front of every call: money, tokens, calls and wall-clock time.

One budget serves all roles of a run, and all its processes through one `Account`. What is
guaranteed:

- calls: never more than the limit. A call is what a caller asked for; its retries are none.
- money and tokens, where a call's worst case is known (it has `max_tokens`): an attempt starts
  only if what was spent, what is held for attempts under way and its own worst case stay within
  the limit together, so the limit is never exceeded. An attempt that would fit but for those
  under way waits for them. The worst case of a prompt is one token for each byte of its JSON
  and a margin for the chat template; images are not covered by that.
- money and tokens, where no `max_tokens` is set: no attempt starts once the limit is spent. The
  limit can be exceeded by the answers then under way.
- time: no attempt starts after the limit, and one under way is cut off at it.
- A reply counts with the usage it reported, even if nothing else in it can be used. An answer
  that told none counts with its worst case. An attempt without an answer (an error, a cut
  connection, a time-out, a cancelled one, a reply that is no JSON) counts nothing unless it
  reported usage: what a vendor charges for those cannot be known here.

A model without a known price is refused under a limit on money, as an input fault.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aflow_tune.errors import BadInput, BudgetReached, Fault
from aflow_tune.models.account import PICO, Account, Hold, Spent
from aflow_tune.models.prices import Price
from aflow_tune.models.types import Usage
from aflow_tune.sections import BudgetSection

_GRACE_SECONDS = 60.0
"""How much longer than its time-out an attempt's hold lives."""
_UNTIMED_SECONDS = 3600.0
"""How long the hold of an attempt without a time-out lives."""
_LONGEST_PAUSE = 0.1


class Budget:
    """The limits of a run, and the account that they are held against.

    Args:
        limits: the section `budget`.
        account: shared by all processes of the run. None: one in this process's memory.
        started: seconds of `time.time()` that `wall_seconds` counts from. None: now.

    Raises:
        BadInput: a limit is negative or not finite.
    """

    def __init__(
        self,
        limits: BudgetSection,
        account: Account | None = None,
        started: float | None = None,
    ) -> None:
        faults = check_budget(limits)
        if faults:
            raise BadInput("The budget cannot be used.", faults)
        self.limits = limits
        self.account = account or Account()
        self.started = time.time() if started is None else started

    def count_call(self, role: str, model: str) -> None:
        """Count one call that is about to start.

        Raises:
            BudgetReached: it may not start.
        """
        self._check_time()
        if not self.account.count_call(role, model, self.limits.calls):
            under_way = self.account.under_way()[0]
            those = f", {under_way} of them under way" if under_way else ""
            raise self._reached(f"calls: {self.limits.calls} were made{those}")

    async def hold(
        self,
        role: str,
        model: str,
        price: Price | None,
        prompt_tokens: int,
        completion_tokens: int | None,
        seconds: float | None,
        *,
        wait: bool = True,
    ) -> Hold:
        """Put the worst case of one attempt aside; waits while others hold what it needs.

        Args:
            prompt_tokens: at most so many.
            completion_tokens: at most so many. None: there is no bound.
            seconds: how long the attempt may take. None: there is no bound.
            wait: False for a call made inside of another's attempt, which would wait for itself.

        Raises:
            BudgetReached: it may not start.
            BadInput: there is a limit on money and the price is not known.
        """
        limits = self.limits
        if limits.usd is not None and price is None:
            fault = unpriced(role, model)
            raise BadInput("A budget of money needs the price of every model.", [fault])
        worst = Usage(prompt_tokens, completion_tokens or 0)
        pico = 0 if price is None else picodollars(price.cost(worst))
        pause = 0.005
        while True:
            self._check_time()
            answer = self.account.hold(
                pico,
                worst.prompt_tokens + worst.completion_tokens,
                bounded=completion_tokens is not None,
                most_pico=None if limits.usd is None else picodollars(limits.usd),
                most_tokens=limits.tokens,
                seconds=_UNTIMED_SECONDS if seconds is None else seconds + _GRACE_SECONDS,
            )
            if isinstance(answer, Hold):
                return answer
            if answer is None and not wait:
                answer = "tokens" if limits.usd is None else "money"
            if answer is not None:
                raise self._reached(self._used(answer), "the next call might exceed it")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def seconds_left(self) -> float | None:
        """Until `wall_seconds`; None without a limit, never below zero."""
        if self.limits.wall_seconds is None:
            return None
        return max(self.started + self.limits.wall_seconds - time.time(), 0.0)

    def out_of_time(self) -> BudgetReached:
        """The error of an attempt that was cut off at `wall_seconds`."""
        return self._reached(f"wall_seconds: {self.limits.wall_seconds:g} s have passed")

    @property
    def reached(self) -> str | None:
        """The limit that some process of the run met first, or None."""
        return self.account.reached()

    @property
    def spent(self) -> Spent:
        """By all processes of the run."""
        return self.account.spent()

    def _check_time(self) -> None:
        if self.seconds_left() == 0.0:
            raise self.out_of_time()

    def _used(self, what: str) -> str:
        """What of a limit is gone: spent, or held for calls whose answers are not there yet."""
        spent, (calls, pico, tokens) = self.account.spent(), self.account.under_way()
        if what == "money":
            used, held = f"usd: {spent.usd:.6g} of {self.limits.usd:g} are spent", pico / PICO
        else:
            used, held = f"tokens: {spent.tokens} of {self.limits.tokens} are used", tokens
        under_way = "a call" if calls == 1 else f"{calls} calls"
        return f"{used}, {under_way} under way may use {held:.6g} more" if calls else used

    def _reached(self, what: str, why: str = "") -> BudgetReached:
        reason = f"budget.{what}" + (f", and {why}" if why else "")
        self.account.mark_reached(reason)
        return BudgetReached(f"A limit was reached. {reason}.")


def picodollars(usd: float) -> int:
    """US dollars as whole picodollars."""
    return round(usd * PICO)


def check_budget(limits: BudgetSection) -> list[Fault]:
    """What is wrong with the section `budget`."""
    faults = []
    for name in ("wall_seconds", "usd", "tokens", "calls"):
        value: Any = getattr(limits, name)
        if value is not None and not 0 <= value < float("inf"):
            cure = f"give `budget.{name}` a number from 0, or null for no limit"
            faults.append(Fault(f"budget.{name}", "a number from 0", str(value), cure))
    return faults


def unpriced(role: str, model: str) -> Fault:
    """What is wrong with a limit on money where this model's price is not known."""
    return Fault(
        f"models.{role}.prices",
        f"what {model} costs, since budget.usd is set",
        "no price, neither in the configuration nor in the list",
        f"models: {{{role}: {{prices: {{input: ..., output: ...}}}}}} in US dollars for "
        "a million tokens, 0 for a model of your own, or {listed: NAME} as the list calls it; or "
        "limit budget.tokens instead",
    )
