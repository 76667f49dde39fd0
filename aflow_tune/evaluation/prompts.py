"""Prompts for one column of an evaluation, from a YAML file.

The file has the form of the configuration's prompts: texts by operator, by `Operator.instance`
or, for an operator graph, by the name of a constant of its prompt file. They may stand under a
key `prompts:`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

Workflow = Callable[..., Any]
Prompts = Mapping[str, Any]


def with_prompts(
    workflow: Workflow, path: Path | None, config: AflowConfig
) -> tuple[Workflow, Prompts]:
    """The workflow, and the run's prompts, with those of a file on top; as they are without one.

    Raises:
        BadInput: the file is no YAML mapping, or a prompt fits no operator or graph.
    """
    if path is None:
        return workflow, config.prompts
    prompts = read_prompts(path)
    graph = as_graph(workflow)
    if graph is not None:
        changed = dataclasses.replace(graph, graph=graph.graph.with_prompts(prompts))
        return changed, config.prompts
    from aflow_tune.operators import OPERATORS, check_prompts, load_operators

    known = {**OPERATORS, **load_operators(config.operators, config.positions.base)}
    check_prompts(prompts, str(path), known)
    return workflow, _on_top(config.prompts, prompts)


def as_graph(workflow: Workflow) -> Any:
    """`workflow` if it is an operator graph, else None; the graph room, which is not needed for
    anything else, is not imported to find out."""
    return workflow if type(workflow).__module__ == "aflow_tune.graph.workflow" else None


def read_prompts(path: Path) -> Mapping[str, Any]:
    """The mapping in a file of prompts.

    Raises:
        BadInput: it cannot be read, or holds no mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _refused(path, " ".join(str(error).split())) from error
    if isinstance(content, dict) and set(content) == {"prompts"}:
        content = content["prompts"]
    if not isinstance(content, dict) or not content:
        raise _refused(path, "nothing" if not content else f"a {type(content).__name__}")
    return content


def _on_top(below: Prompts, above: Prompts) -> Prompts:
    """Both, where a text of `above` wins over the same prompt's of `below`."""
    merged = dict(below)
    for key, texts in above.items():
        under = merged.get(key)
        if isinstance(texts, Mapping) and isinstance(under, Mapping):
            texts = {**under, **texts}
        merged[key] = texts
    return merged


def _refused(path: Path, found: str) -> BadInput:
    expected = "a YAML mapping of operators to texts, such as `Review: {main: ...}`"
    cure = "write the prompts by operator or by Operator.instance"
    return BadInput(
        "The prompts cannot be used.", [Fault(f"--prompts {path}", expected, found, cure)]
    )
