"""How our pages are made: templates of this folder, rendered whole and written whole.

Self-contained: style and charts are inline, there is no script, and a content policy in the page
forbids loading or running anything. Everything that a model or a user wrote is escaped by the
templates, which share their head and the view of a run.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from aflow_tune.files import write_whole


def render(template: str, **content: Any) -> str:
    """The text of a page."""
    import jinja2

    folder = resources.files("aflow_tune.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**content)


def write_page(path: Path, text: str) -> Path:
    """Write a page whole or not at all; returns its path."""
    write_whole(path, text)
    return path
