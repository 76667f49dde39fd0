"""Runs in the sandbox: loads a model's program and calls it as the other side asks.

Everything here may be overwritten by the program it loads, and nothing here is believed: what
it sends is only ever used as the value of a call. Never imported by the project.
"""

import types
from typing import Any

import aflow_channel
import aflow_values

kept: list = []
numbers: dict = {}
OPERATIONS: dict = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "attribute": getattr,
    "truth": bool,
}


class EqualsAnything(BaseException):
    """A result that claims to equal what it has never seen."""


def keep(value: Any) -> tuple:
    number = numbers.setdefault(id(value), len(kept))
    if number == len(kept):
        kept.append(value)
    return number, type(value).__name__


def find(number: int, _: str) -> Any:
    return kept[number]


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def load() -> types.ModuleType:
    module = types.ModuleType("builtins")  # so it is in the public code, for want of a name
    module.__dict__.update(aflow_values.PRESET)
    for name in ("helpers.py", "solution.py"):
        with open(name, encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), name, "exec"), module.__dict__)
    return module


def answer(operation: str, number: int, message: list) -> dict:
    """What came of an operation on something that is kept here."""
    crossing = aflow_values.Crossing(keep, find)
    args, kwargs = crossing.receive(message)
    names: list = []
    try:
        value = OPERATIONS[operation](kept[number], *args, **kwargs)
    except Exception as error:
        value, names = error, [kind.__name__ for kind in type(error).__mro__]
    try:
        result = crossing.send(value, message[1])
    except Exception as error:
        return {"stays": described(error)}
    if any(equals_anything(odd) for odd in crossing.odd):
        raise EqualsAnything(f"a {type(value).__name__}")
    return {"result": result, "raised": names, "odd": bool(crossing.odd)}


def equals_anything(value: Any) -> bool:
    try:
        return bool(value == object())
    except Exception:
        return False


def main() -> None:
    try:
        keep(load())
    except BaseException as error:
        aflow_channel.send({"failed": described(error)})
        return
    aflow_channel.send({"loaded": True})
    while (request := aflow_channel.receive()) is not None:
        turn, *asked = request
        try:
            reply = answer(*asked)
        except BaseException as error:  # SystemExit among them: no call may end like that
            reply = {"ended": described(error)}
        try:
            aflow_channel.send({"turn": turn, **reply})
        except Exception as error:
            aflow_channel.send({"turn": turn, "ended": described(error)})


if __name__ == "__main__":
    main()
