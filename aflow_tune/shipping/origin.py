"""Whose code a file is: the user's, which has to travel, or installed, which every node has.

Installed is the standard library, whatever lies in a folder `site-packages` or `dist-packages`,
and this package. A project that was installed with `pip install -e` lies elsewhere: it counts as
the user's, since only this machine has that folder.

Paths are compared as they are written and with their links followed: an interpreter that is
reached by a link names its modules by either.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

_INSTALL_NAMES = {"site-packages", "dist-packages"}
_OWN_NAME = "aflow-tune"


def is_installed(path: Path) -> bool:
    """Whether this file or folder belongs to what is installed. `path` is absolute."""
    if _INSTALL_NAMES & set(path.parts):
        return True
    return any(path.is_relative_to(place) for place in _installed_folders())


def import_folders() -> list[Path]:
    """Folders of the user's that this process imports from, in order."""
    folders = dict.fromkeys(Path(entry or ".").absolute() for entry in sys.path)
    return [folder for folder in folders if folder.is_dir() and not is_installed(folder)]


def editable_records(files: Iterable[Path]) -> Iterator[Path]:
    """The files that tell of what `pip install -e` installed and these files belong to: its
    version, entry points and the like, which code may ask for. They lie in `site-packages`."""
    given = [file.resolve() for file in files]
    for distribution in importlib.metadata.distributions() if given else ():
        project = _editable_project(distribution)
        if project is None or (distribution.metadata["Name"] or "").lower() == _OWN_NAME:
            continue
        if not any(file.is_relative_to(project) for file in given):
            continue
        for record in distribution.files or ():
            path = Path(str(record.locate()))
            if record.parts[0].endswith(".dist-info") and path.is_file():
                yield path.absolute()


def _editable_project(distribution: importlib.metadata.Distribution) -> Path | None:
    """The folder of a project that was installed in place; None for what was copied."""
    told = distribution.read_text("direct_url.json")
    try:
        direct = json.loads(told or "{}")
        if not direct.get("dir_info", {}).get("editable"):
            return None
        return Path(unquote(urlsplit(direct["url"]).path)).resolve()
    except (ValueError, KeyError, AttributeError):
        return None


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    """Asked of every module of a process: looking it up each time would take seconds."""
    raw = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    raw.append(Path(__file__).absolute().parents[1])
    return tuple({*raw, *(path.resolve() for path in raw)})
