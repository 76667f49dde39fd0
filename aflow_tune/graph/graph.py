"""`load_graph` and `Graph`: a workflow over operators with its prompts, as one value.

A graph consists of its source texts: it can be pickled to a worker that has none of its files, run
concurrently, given other prompts, drawn, and written back. Loading executes none of its code.

On disk, our form is a folder with `graph.py` and `prompts.json`, which maps the name of a prompt
constant, an operator instance or an operator to its text (for an operator with several prompts, to
an object of texts); and perhaps `instructions.json` (`Graph.instructions`). AFlow's form is a
`round_N` folder with `graph.py` and `prompt.py`. The two may be mixed; prompts.json wins.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph import inside
from aflow_tune.graph.flow import Flow, trace_flow
from aflow_tune.graph.run import Broker, GraphLimits, GraphRun, run_graph
from aflow_tune.graph.shape import MAX_SOURCE_CHARS, Shape, examine, nearest
from aflow_tune.models import as_client
from aflow_tune.models.types import ModelClient
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.operators.prompts import checked
from aflow_tune.trace import POLICY

DEFAULT_DATASET = "custom"
PROMPTS_FILE = "prompts.json"
INSTRUCTIONS_FILE = "instructions.json"
PromptText = str | Mapping[str, str]


def bare(name: str) -> str:
    """A name without prefix, underscores and case: equal for `SC_ENSEMBLE` and `ScEnsemble`."""
    return name.rpartition(".")[2].replace("_", "").casefold()


@dataclass(frozen=True)
class Graph:
    """A loaded graph. `with_prompts` returns one with other prompts; `run` executes it."""

    label: str  # the folder it was loaded from, for messages
    sources: Mapping[str, str]  # graph.py, and prompt.py where there is one
    prompts: Mapping[str, PromptText] = field(default_factory=dict)
    """Prompts that override prompt.py and the operators', by constant, instance or operator."""
    dataset: str | None = None
    """From the path `.../DATASET/workflows/round_N`, else from the imports, as is `round`."""
    round: int | None = None
    trust: bool = False  # whether its code runs in this process, outside the sandbox
    operators: Mapping[str, type[Operator]] = field(default_factory=dict)
    """The user's operators that it may name, besides those of the registry."""
    instructions: Mapping[str, str] = field(default_factory=dict)
    """Texts without placeholders, by instance, or by operator for instances without their own. The
    graph's code reads them as `self.prompts["name"]` (empty if missing) and `prompt_custom.name`.
    If a call takes the argument `instruction` and the code leaves it empty, the text goes there;
    if a call takes none, it goes in front of the operator's main prompt."""

    @property
    def known(self) -> dict[str, type[Operator]]:
        """Every operator that the graph may name, by name."""
        return {**OPERATORS, **self.operators}

    @functools.cached_property
    def shape(self) -> Shape:
        """What static analysis of its source finds: operators, prompts, faults."""
        named = {*self.prompts, *self.instructions}
        return examine(self.sources, sorted(self.known), named, self.label)

    @functools.cached_property
    def flow(self) -> Flow:
        """Its calls and the edges between them."""
        return trace_flow(self.shape)

    @functools.cached_property
    def told(self) -> dict[str, str]:
        """`instructions`, also under each instance and operator that they apply to: an instance's
        name is for it alone, `custom` or `operator.Custom` for every `Custom` without its own."""
        instances = self.shape.instances
        meant = {
            bare(name): text for name, text in self.instructions.items() if name not in instances
        }
        told = dict(self.instructions)
        for name in [*instances, *self.known]:
            if words := meant.get(bare(name), meant.get(bare(instances.get(name, name)))):
                told.setdefault(name, words)
        return told

    @property
    def constants(self) -> dict[str, str]:
        """The prompts that override constants of prompt.py, read as `prompt_custom.NAME`."""
        own = self.operator_prompts
        texts = {name: text for name, text in self.prompts.items() if name not in own}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @property
    def operator_prompts(self) -> dict[str, PromptText]:
        """The prompts for operators, by `instance`, `Operator` or `Operator.instance`."""
        return {name: text for name, text in self.prompts.items() if self._operator_of(name)}

    def _operator_of(self, name: str) -> str | None:
        """The operator that the name of a prompt refers to; None for a constant."""
        instances = self.shape.instances
        operator, _, instance = name.partition(".")
        fits = operator in self.known and (not instance or instance in instances)
        return instances.get(name, operator if fits else None)

    def prompt_faults(self) -> list[Fault]:
        """Faults of the prompts for operators: unknown prompts, missing or unknown placeholders."""
        faults = []
        for name, texts in self.operator_prompts.items():
            kind = self.known.get(self._operator_of(name) or "")
            if kind is not None:
                faults += checked(texts, kind.asks, f"{self.label}: prompts.{name}")[1]
        return faults

    def with_prompts(self, prompts: Mapping[str, PromptText]) -> Graph:
        """A copy with other texts for constants of `prompt_custom`, instances or operators.

        Raises:
            BadInput: a name that the graph does not have, or a text that does not fit.
        """
        texts, faults = _checked_prompts(prompts, self.label)
        constants = {*self.shape.constants, *self.prompts}
        for name in texts:
            if name not in constants and self._operator_of(name) is None:
                known = sorted({*constants, *self.shape.instances, *self.shape.instances.values()})
                expected = f"one of: {', '.join(known) or 'nothing'}"
                fix = nearest(name, known, "name one of them")
                faults.append(Fault(self.label, expected, name, fix))
        changed = replace(self, prompts={**self.prompts, **texts})
        faults += changed.prompt_faults()
        if faults:
            raise BadInput("Prompts that do not fit the graph.", faults)
        return changed

    async def run(
        self,
        problem: str,
        entry_point: str | None = None,
        *,
        model: Any,
        clients: Mapping[str, ModelClient] | None = None,
        models: Mapping[str, str] | None = None,
        limits: GraphLimits | None = None,
        sandbox: str = "auto",
        dataset: str | None = None,
    ) -> GraphRun:
        """Run the graph on one problem. Failures of the graph are in the result, not raised.

        Args:
            entry_point: name of the function to write, for graphs that take one.
            model: the policy, as `aflow_tune.models.as_client` takes it.
            clients: other models by role.
            models: role by instance, operator or the name that the graph uses for a model.
            sandbox: sandbox policy for the graph's code; a trusted graph runs without one.
            dataset: passed to the graph. None: the one of the folder, else `DEFAULT_DATASET`.

        Raises:
            BudgetReached: the budget of the run is spent.
            BadInput: the graph takes an entry point and got none, or `models` names a role
                without a client.
        """
        offered = {POLICY: as_client(model), **(clients or {})}
        if unknown := sorted(set((models or {}).values()) - set(offered)):
            raise BadInput(f"{self.label}: no client for the role {', '.join(unknown)}")
        arguments = [problem]
        if entry_point is not None and len(self.shape.parameters) > 1:
            arguments.append(entry_point)
        elif self.shape.needs_entry_point and entry_point is None:
            raise BadInput(f"{self.label}: the graph takes an entry point, the task has none")
        broker = Broker(
            clients=offered,
            roles=dict(models or {}),
            operators=self.known,
            prompts=self.operator_prompts,
            limits=limits or GraphLimits(),
            instructions=self.told,
        )
        sites = {f"{item.line}:{item.column}": item.instance for item in self.shape.operators}
        setup = {
            "operators": sorted(self.known),
            "sites": sites,
            "prompts": self.constants,
            "instructions": self.told,
            "dataset": dataset or self.dataset or DEFAULT_DATASET,
            "model": POLICY,
            "arguments": arguments,
            "files": sorted(self.sources),
        }
        return await run_graph(
            self.label, self.sources, setup, broker, None if self.trust else sandbox
        )

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are computed again on the worker.
        derived = ("shape", "flow", "told")
        return {name: value for name, value in vars(self).items() if name not in derived}


def load_graph(
    path: str | Path,
    *,
    trust: bool = False,
    operators: Mapping[str, type[Operator]] | None = None,
) -> Graph:
    """As `read_graph`, but raises `BadInput` with every fault if the graph has any."""
    graph = read_graph(path, trust=trust, operators=operators)
    faults = [*graph.shape.faults, *graph.prompt_faults()]
    if faults:
        raise BadInput(f"The graph at {path} cannot run.", faults)
    return graph


def read_graph(
    path: str | Path,
    *,
    trust: bool = False,
    operators: Mapping[str, type[Operator]] | None = None,
) -> Graph:
    """Load a graph without executing it. It may have faults: see `Graph.shape.faults`.

    Args:
        path: a folder in our form or AFlow's, or the graph.py in it.
        trust: whether its code may run in this process, outside the sandbox.
        operators: the user's, by name, that it may use besides those of the registry.

    Raises:
        BadInput: there is no graph, or its files cannot be read.
    """
    folder = Path(path)
    if folder.name == inside.GRAPH_FILE and not folder.is_dir():
        folder = folder.parent
    label = str(folder)
    if not (folder / inside.GRAPH_FILE).is_file():
        found = f"no {inside.GRAPH_FILE} in it" if folder.is_dir() else "no such folder"
        fix = "name a folder with graph.py and prompts.json, or a round_N folder of AFlow"
        raise BadInput.of(f"There is no graph at {path}.", label, "a graph", found, fix)
    faults: list[Fault] = []
    sources: dict[str, str] = {}
    for name in (inside.GRAPH_FILE, inside.PROMPT_FILE, PROMPTS_FILE, INSTRUCTIONS_FILE):
        text = _text(folder / name, f"{label}/{name}", faults)
        sources |= {} if text is None else {name: text}
    prompts, wrong = _read_prompts(sources, PROMPTS_FILE, label)
    told, more = _read_prompts(sources, INSTRUCTIONS_FILE, label)
    texts = {name: text for name, text in told.items() if isinstance(text, str)}
    faults += [*wrong, *more]
    if faults:
        raise BadInput(f"The graph at {path} cannot be read.", faults)
    source = sources[inside.GRAPH_FILE]
    # Data set and round: from the path of the folder, else from the imports of graph.py.
    resolved = folder.resolve()
    number = re.fullmatch(r"round_(\d+)", resolved.name)
    dataset: str | None = resolved.parent.parent.name
    if not number or not resolved.parent.name.startswith("workflows"):
        named = re.search(r"import\s+[\w.]*?(\w+)\.workflows\w*\.", source)
        dataset, number = named and named[1], re.search(r"\.round_(\d+)\.prompt\b", source)
    round_number = number and int(number[1])
    own = dict(operators or {})
    return Graph(label, sources, prompts, dataset, round_number, trust, own, texts)


def _text(path: Path, label: str, faults: list[Fault]) -> str | None:
    if not path.is_file():
        return None
    try:
        if path.is_symlink():
            # A link in a downloaded graph could have a private file sent to a model.
            found = f"a link to {path.readlink()}"
        elif path.stat().st_size > 4 * MAX_SOURCE_CHARS:
            found = f"{path.stat().st_size} bytes"
        else:
            return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = str(error)
    expected = f"a file, no link, of at most {MAX_SOURCE_CHARS} characters in UTF-8"
    faults.append(Fault(label, expected, found, "put such a file there"))
    return None


def _read_prompts(
    sources: dict[str, str], name: str, label: str
) -> tuple[dict[str, PromptText], list[Fault]]:
    """Take a file of prompts out of `sources`: its texts, and its faults."""
    try:
        given = json.loads(sources.pop(name, "{}"))
    except (ValueError, RecursionError) as error:
        return {}, [Fault(f"{label}/{name}", "a JSON object", str(error), "correct the file")]
    return _checked_prompts(given, f"{label}/{name}")


def _checked_prompts(given: Any, where: str) -> tuple[dict[str, PromptText], list[Fault]]:
    """The well-formed prompts, and a fault for each of the others."""
    expected = "an object from names to texts, or to objects of texts"
    fix = 'write {"NAME": "text"}'
    if not isinstance(given, Mapping):
        return {}, [Fault(where, expected, type(given).__name__, fix)]
    prompts: dict[str, PromptText] = {}
    faults = []
    for name, value in given.items():
        texts = value.values() if isinstance(value, Mapping) else [value]
        if isinstance(name, str) and all(isinstance(text, str) for text in texts):
            prompts[name] = dict(value) if isinstance(value, Mapping) else value
        else:
            faults.append(Fault(where, expected, f"{name!r:.40}: {value!r:.80}", fix))
    return prompts, faults
