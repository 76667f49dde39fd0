"""Runs in the sandbox: a model's program and its tests in one process, as the field runs them.

The program can change anything here, its own verdict among it, as it can in the public code:
what passes here is believed only by the published rule. Never imported by the project.
"""

import builtins
import threading
import types
from typing import Any

import aflow_channel
import aflow_values


def main() -> None:
    token, shared, entry_point, helpers, solution, tests = aflow_channel.receive()
    space: dict = dict(aflow_values.PRESET)
    try:
        exec(helpers, space)
    except Exception as error:
        aflow_channel.send([token, None, f"the helpers fail: {type(error).__name__}: {error}"])
        return
    faults = ["the program ended the thread that loads it"]

    def judge() -> None:
        try:
            check = loaded(space, shared, entry_point, helpers, solution, tests)
            # From here on a thread that ends without an error is what passes in the public code,
            # even if SystemExit ended it.
            faults.clear()
            check()
        except Exception as error:
            faults[:] = [f"{type(error).__name__}: {error}"[:500]]

    # As in the public code: there `signal` cannot be used, and recursion starts as deep.
    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    aflow_channel.send([token, not faults, "".join(faults)])


def loaded(
    space: dict, shared: bool, entry_point: str, helpers: str, solution: str, tests: str
) -> Any:
    """The tests as a function without arguments."""
    exec(solution, space)
    if entry_point not in space:
        raise NameError(f"the program defines no function {entry_point}")
    function = space[entry_point]
    if not shared:  # neither may change what the other's names mean
        hidden = {*vars(builtins), *aflow_values.PRESET} - {entry_point}
        space = {name: value for name, value in space.items() if name not in hidden}
        space.update(aflow_values.PRESET)
        space[entry_point] = function
        exec(helpers, space)
    own = space.get("check")
    space["candidate"] = function
    exec(tests, space)
    check = space.get("check")
    if check is own or not isinstance(check, types.FunctionType):
        return lambda: None
    return lambda: check(function) if check.__code__.co_argcount else check()


if __name__ == "__main__":
    main()
