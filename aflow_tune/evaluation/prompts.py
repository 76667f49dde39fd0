"""Prompts for one column of an evaluation, from a YAML file.

The file has the form of the configuration's prompts: texts by operator, by `Operator.instance`
or, for an operator graph, by the name of a constant of its prompt file. They may stand under a
key `prompts:`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

Workflow = Callable[..., Any]


def with_prompts(workflow: Workflow, path: Path | None) -> Workflow:
    """`workflow` under the prompts of a file; itself where there is none.

    Raises:
        BadInput: the file is no YAML mapping, or a prompt fits no operator or graph.
    """
    if path is None:
        return workflow
    prompts = read_prompts(path)
    graph = as_graph(workflow)
    if graph is not None:
        return dataclasses.replace(graph, graph=graph.graph.with_prompts(prompts))
    from aflow_tune.operators.registry import check_prompts

    check_prompts(prompts, str(path))
    return _under(workflow, prompts)


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


def _under(workflow: Workflow, prompts: Mapping[str, Any]) -> Workflow:
    """The workflow with these prompts in its context; its signature stays what it was."""
    if isinstance(workflow, functools.partial):
        inner = _under(workflow.func, prompts)
        return functools.partial(inner, *workflow.args, **workflow.keywords)

    from aflow_tune.operators.prompts import use_prompts

    @functools.wraps(workflow)
    async def under(*args: Any, **kwargs: Any) -> Any:
        with use_prompts(prompts):
            return await workflow(*args, **kwargs)

    return under


def _refused(path: Path, found: str) -> BadInput:
    expected = "a YAML mapping of operators to texts, such as `Review: {main: ...}`"
    cure = "write the prompts by operator or by Operator.instance"
    return BadInput(
        "The prompts cannot be used.", [Fault(f"--prompts {path}", expected, found, cure)]
    )
