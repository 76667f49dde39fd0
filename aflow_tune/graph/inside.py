"""The program around a graph's code in the sandbox: shims for AFlow's modules, and the channel.

A graph written for AFlow imports its operators, prompts and model from modules of that project.
Here they are shims: each call of an operator or of the model is one message to the parent process,
which alone holds them. All other imports are Python's own.

This file is the whole program in the sandbox, where this project is not installed: it uses only the
standard library. It is no security boundary: the sandbox around the process limits what the graph's
code may do, and `run.py` trusts no message.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
import math
import os
import re
import sys
import threading
import traceback
import types
from typing import Any, Literal

GRAPH_FILE = "graph.py"
PROMPT_FILE = "prompt.py"

MAX_TEXT = 2000  # characters of an exception's text
FOREIGN_PACKAGES = ("workspace", "scripts", "metagpt")
"""Top-level packages of AFlow; their modules without a shim cannot be imported."""

_MODULES = {
    "scripts.async_llm": "model",
    "metagpt.provider.llm_provider_registry": "model",
    "scripts.evaluator": "dataset",
    "metagpt.ext.aflow.scripts.evaluator": "dataset",
    "metagpt.utils.cost_manager": "cost",
    "scripts.logs": "log",
    "metagpt.logs": "log",
    "scripts.operators": "operator",
    "metagpt.ext.aflow.scripts.operator": "operator",
    "operators": "operator",
    "prompt": "prompt",
}
_ENDINGS = (
    (re.compile(r"\.template\.operator$"), "operator"),
    (re.compile(r"\.round_\w+\.prompt$"), "prompt"),
)
_HOME = "workflows.round_0"  # the package that relative imports of a graph are relative to

NAMES_OF = {
    "model": ("create_llm_instance", "AsyncLLM", "LLMConfig"),
    "dataset": ("DatasetType",),
    "cost": ("CostManager",),
    "log": ("logger",),
}
"""Names that each shim offers, besides operators and prompts."""


def shim_of(module: str) -> str | None:
    """The shim for a module of this absolute name, or None."""
    if module in _MODULES:
        return _MODULES[module]
    return next((kind for ending, kind in _ENDINGS if ending.search(f".{module}")), None)


def absolute(module: str, level: int) -> str:
    """The absolute name of an imported module, with leading dots resolved."""
    if not level:
        return module
    package = _HOME.split(".")[: max(0, 3 - level)]
    return ".".join([*package, module] if module else package)


class CallFailed(RuntimeError):
    """An operator or model in the parent process failed; the message says how."""


class LLMConfig:
    """The `llm_config` of a graph. The parent process decides which model it means."""

    def __init__(self, config: Any = None) -> None:
        self.model, self.temperature, self.top_p = "policy", 1, 1
        vars(self).update(config if isinstance(config, dict) else {})


class Usage:
    """Tokens and US dollars that one model of a graph has used so far, as the parent counts them;
    the cost is NaN once a price was unknown."""

    def __init__(self) -> None:
        self.total_prompt_tokens = self.total_completion_tokens = self.call_count = 0
        self.total_cost = 0.0

    def add(self, usage: dict[str, Any]) -> None:
        self.total_prompt_tokens += usage.get("prompt_tokens") or 0
        self.total_completion_tokens += usage.get("completion_tokens") or 0
        cost = usage.get("cost")
        self.total_cost += math.nan if cost is None else cost
        self.call_count += usage.get("calls") or 0

    def get_total_cost(self) -> float:
        return self.total_cost

    def get_summary(self) -> dict[str, Any]:
        return {
            "total_input_tokens": self.total_prompt_tokens,
            "total_output_tokens": self.total_completion_tokens,
            "total_tokens": self.total_prompt_tokens + self.total_completion_tokens,
            "total_cost": self.total_cost,
            "call_count": self.call_count,
        }


class Model:
    """A graph's handle on a model, named by `config`; the parent maps the name to a client."""

    def __init__(self, request: Any, config: Any) -> None:
        self._request = request
        self._name = config if isinstance(config, str) else str(getattr(config, "model", "policy"))
        self.usage_tracker = Usage()
        self.cost_manager = self.usage_tracker

    async def __call__(self, prompt: str) -> str:
        return await self.aask(prompt)

    async def aask(self, msg: str, system_msgs: Any = None, **_: Any) -> str:
        """One call of the model, under MetaGPT's name for it."""
        system = "\n".join(system_msgs) if isinstance(system_msgs, (list, tuple)) else system_msgs
        message = {"call": "model", "model": self._name, "prompt": msg, "system": system}
        reply = await self._request(message)
        self.count(reply["usage"])
        return reply["result"]

    def get_usage_summary(self) -> dict[str, Any]:
        return self.usage_tracker.get_summary()

    def count(self, usage: dict[str, Any]) -> None:
        self.usage_tracker.add(usage)
        # MetaGPT's graphs assign their own cost manager.
        if self.cost_manager is not self.usage_tracker and isinstance(self.cost_manager, Usage):
            self.cost_manager.add(usage)


class Operator:
    """A graph's handle on the operator `_operator`; a graph may subclass it."""

    _modules: Any = None
    _operator = ""

    def __init__(self, llm: Any, name: Any = None, **options: Any) -> None:
        if not isinstance(llm, Model):
            raise TypeError(
                f"operator.{type(self).__name__} takes the graph's model first, as in "
                f"operator.{type(self).__name__}(self.llm), not {type(llm).__name__}"
            )
        self.llm = llm
        self.name = name or type(self).__name__
        self._options = options
        self._instance = self._modules.instance_name(type(self).__name__)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        message = {
            "call": "operator",
            "operator": self._operator,
            "instance": self._instance,
            "model": self.llm._name,
            "options": self._options,
            "args": list(args),
            "kwargs": kwargs,
        }
        reply = await self._modules.request(message)
        self.llm.count(reply["usage"])
        return reply["result"]


class Instructions(dict[str, str]):
    """A workflow's `self.prompts`: instructions by instance, '' for missing keys."""

    def __missing__(self, name: Any) -> str:
        return ""


def instruct(workflow: Any, given: dict[str, str]) -> None:
    """Merge the instructions into `prompts` of a workflow or its class, over those there."""
    own = getattr(workflow, "prompts", None)
    if own is None or (given and isinstance(own, dict)):
        try:
            workflow.prompts = Instructions({**(own or {}), **given})
        except (AttributeError, TypeError):
            return  # no attribute can be set, so none can be read


class _Log:
    """Replaces AFlow's logger and discards everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


_numbers = itertools.count()


class Modules:
    """A graph's modules for one execution: the shims, prompt.py and graph.py."""

    def __init__(self, setup: dict[str, Any], sources: dict[str, str], send: Any) -> None:
        self._number = next(_numbers)
        self._sources, self._send, self._sites = sources, send, setup["sites"]
        self._loaded: list[str] = []
        self._built: dict[str, int] = {}
        self._packages: dict[str, types.ModuleType] = {}
        kinds = {
            name: type(name, (Operator,), {"_modules": self, "_operator": name})
            for name in setup["operators"]
        }

        def create(config: Any = None, system_msg: Any = None) -> Model:
            return Model(self.request, config)

        dataset: Any = Literal[setup["dataset"]]
        model = {"create_llm_instance": create, "AsyncLLM": create, "LLMConfig": LLMConfig}
        self._shims = {
            "operator": _module("operator", **kinds),
            "model": _module("model", **model),
            "dataset": _module("dataset", DatasetType=dataset),
            "cost": _module("cost", CostManager=Usage),
            "log": _module("log", logger=_Log()),
        }
        prompts = self._load(PROMPT_FILE) if PROMPT_FILE in sources else _module("prompt")
        vars(prompts).update({**setup["instructions"], **vars(prompts), **setup["prompts"]})
        self._shims["prompt"] = prompts
        # Graphs of AFlow's optimizer use these names without importing them.
        self.graph = self._load(
            GRAPH_FILE,
            operator=self._shims["operator"],
            prompt_custom=prompts,
            create_llm_instance=create,
            DatasetType=dataset,
        )

    def _load(self, file: str, **names: Any) -> types.ModuleType:
        label = f"<graph {self._number}>/{file}"
        name = f"aflow_graph_{self._number}_{file.removesuffix('.py')}"
        module = _module(name, **names, __file__=label, __package__="")
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self.import_}
        sys.modules[name] = module  # dataclasses look up their module by name
        self._loaded.append(name)
        exec(compile(self._sources[file], label, "exec"), vars(module))
        return module

    def close(self) -> None:
        """Remove the modules from `sys.modules`, so that they do not pile up in one process."""
        for name in self._loaded:
            sys.modules.pop(name, None)

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = await self._send(message)
        if "error" in reply:
            kind, text = reply["error"]
            # Wrong arguments raise the same exception as in a local call.
            raise TypeError(text) if kind == "TypeError" else CallFailed(f"{kind}: {text}")
        return reply

    def instance_name(self, kind: str) -> str:
        """The instance name of the operator being built: by its place in graph.py, else counted."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == f"<graph {self._number}>/{GRAPH_FILE}":
                places = frame.f_code.co_positions()
                place = next(itertools.islice(places, frame.f_lasti // 2, None), (None,) * 4)
                if name := self._sites.get(f"{place[0]}:{place[2]}"):
                    return name
            frame = frame.f_back
        count = self._built[kind] = self._built.get(kind, 0) + 1
        return f"{kind.lower()}_{count}"

    def import_(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        """`__import__` for the graph: the shims for AFlow's modules, Python's own for the rest."""
        module = absolute(name, level)
        kind = shim_of(module)
        if kind is not None:
            shim = self._shims[kind]
            return shim if fromlist else self._nested(module, shim)
        kinds = {item: shim_of(f"{module}.{item}") for item in fromlist or ()}
        if any(kinds.values()):
            found = {item: self._shims[kind] for item, kind in kinds.items() if kind}
            return _module(module, **found)
        if level or module.partition(".")[0] in FOREIGN_PACKAGES:
            raise ModuleNotFoundError(f"No module named {module!r} for a graph", name=module)
        return builtins.__import__(name, globals, locals, fromlist, 0)

    def _nested(self, module: str, shim: types.ModuleType) -> types.ModuleType:
        """The top-level package of `module`, with the shim where the import looks for it."""
        top, *parts = module.split(".")
        if not parts:
            return shim
        package = place = self._packages.setdefault(top, types.ModuleType(top))
        for part in parts[:-1]:
            place = vars(place).setdefault(part, types.ModuleType(part))
        setattr(place, parts[-1], shim)
        return package


async def run(
    setup: dict[str, Any], sources: dict[str, str], send: Any, built: Any
) -> dict[str, Any]:
    """Build the graph and run it once.

    Args:
        setup: `operators` (names), `sites` (`line:column` of the operators built in graph.py to
            their names), `prompts` (constants that win over prompt.py), `instructions` (by
            instance), `dataset`, `model` and `arguments`, which are passed in order.
        sources: the graph's files by name.
        send: takes a message, returns the reply.
        built: called once the workflow has been constructed.

    Returns:
        `{"end": "answer", "answer"}`, or `{"end": "raised", "kind", "text", "place"}`; `place` is
        `file:line` in the graph's files, or empty. Exceptions of the graph are never raised.
    """
    modules = None
    try:
        modules = Modules(setup, sources, send)
        config = LLMConfig({"model": setup["model"]})
        kind = modules.graph.Workflow
        instruct(kind, setup["instructions"])  # its constructor may read them
        workflow = kind(name=setup["dataset"], llm_config=config, dataset=setup["dataset"])
        instruct(workflow, setup["instructions"])
        built()
        returned = await workflow(*setup["arguments"])
    except (Exception, SystemExit) as error:
        return _raised(error)
    finally:
        if modules is not None:
            modules.close()
    if isinstance(returned, tuple):
        if len(returned) != 2:
            text = f"the workflow returned {len(returned)} values, not an answer and its cost"
            return {"end": "raised", "kind": "ValueError", "text": text, "place": ""}
        returned = returned[0]
    return {"end": "answer", "answer": returned}


def _raised(error: BaseException) -> dict[str, Any]:
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename.rpartition('/')[2]}:{error.lineno}"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith("<graph "):
            place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    try:
        text = str(error)[:MAX_TEXT]
    except Exception:
        text = "its text cannot be made"
    return {"end": "raised", "kind": type(error).__name__, "text": text, "place": place}


def main() -> None:
    """The program in the sandbox: execute the graph once, over the channel."""
    import aflow_channel

    setup = aflow_channel.receive()
    sources = {}
    for name in setup["files"]:
        with open(name, encoding="utf-8") as file:
            sources[name] = file.read()
    end = asyncio.run(_over_channel(setup, sources, aflow_channel))
    try:
        end = {**end, "answer": plain(end["answer"])} if end["end"] == "answer" else end
    except Exception as error:  # its `__str__` can raise, or it contains itself
        end = _raised(error)
    aflow_channel.send(end)
    # Tasks and threads that the graph left running must not delay the exit.
    sys.stdout.flush()
    os._exit(0)


async def _over_channel(setup: dict[str, Any], sources: dict[str, str], channel: Any) -> Any:
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[Any]] = {}
    numbers = itertools.count(1)

    def deliver(reply: dict[str, Any]) -> None:
        future = waiting.pop(reply["id"], None)
        if future is not None and not future.done():
            future.set_result(reply)

    def listen() -> None:
        while (reply := channel.receive()) is not None:
            loop.call_soon_threadsafe(deliver, reply)

    async def send(message: dict[str, Any]) -> Any:
        number = next(numbers)
        waiting[number] = loop.create_future()
        channel.send({"id": number, **message})
        return await waiting[number]

    threading.Thread(target=listen, daemon=True).start()
    return await run(setup, sources, send, lambda: channel.send({"built": True}))


def plain(value: Any) -> Any:
    """An answer as JSON values; other objects, NaN and infinities become their text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)
