"""Runs in the sandbox: loads a model's program and calls it as the other side asks.

Everything here may be overwritten by the program it loads, and nothing here is believed: what
it sends is only ever used as the value of a call. Never imported by the project.
"""

import sys
import types
from typing import Any

import aflow_channel
import aflow_values

kept: list = []


def keep(value: Any) -> tuple:
    kept.append(value)
    return len(kept) - 1, type(value).__name__


def failure(error: BaseException) -> dict:
    names = [kind.__name__ for kind in type(error).__mro__]
    return {"names": names, "message": str(error)[:300]}


def load() -> types.ModuleType:
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    module.__dict__.update(aflow_values.PRESET)
    for name in ("helpers.py", "solution.py"):
        with open(name, encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), name, "exec"), module.__dict__)
    return module


def describe(module: types.ModuleType) -> dict:
    """What the tests may refer to by name: functions, modules, plain values."""
    names: dict = {}
    for name, value in vars(module).items():
        if name.startswith("__") or aflow_values.PRESET.get(name) is value:
            continue
        if isinstance(value, types.ModuleType):
            names[name] = {"module": value.__name__}
        elif callable(value):
            names[name] = {"call": True}
        else:
            try:
                names[name] = {"value": aflow_values.encode(value, keep)}
            except Exception:
                continue
    return names


def call(module: types.ModuleType, name: str, args: list, kwargs: list) -> dict:
    def find(number: int, _: str) -> Any:
        return kept[number]

    given = aflow_values.decode(args, find)
    named = aflow_values.decode({"d": kwargs}, find)
    try:
        result = {"value": aflow_values.encode(getattr(module, name)(*given, **named), keep)}
    except Exception as error:
        result = {"raised": failure(error)}
    changed = {}
    for place, value in enumerate(given):
        if isinstance(value, aflow_values.MUTABLE):
            after = aflow_values.encode(value, keep)
            if after != args[place]:
                changed[str(place)] = after
    return {**result, "changed": changed}


def main() -> None:
    try:
        module = load()
    except BaseException as error:
        aflow_channel.send({"failed": failure(error)})
        return
    aflow_channel.send({"names": describe(module)})
    while (request := aflow_channel.receive()) is not None:
        number, name, args, kwargs = request
        try:
            reply = call(module, name, args, kwargs)
        except BaseException as error:  # SystemExit among them: no call may end like that
            reply = {"ended": failure(error)}
        try:
            aflow_channel.send({"number": number, **reply})
        except Exception as error:
            aflow_channel.send({"number": number, "ended": failure(error)})


if __name__ == "__main__":
    main()
