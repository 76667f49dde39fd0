"""Which files of a folder travel, and which never do.

Hidden files stay (`.env` holds keys, `.git` is large), and so do keys by their usual names,
virtual environments, caches, compiled modules (they belong to this machine's Python) and single
files that are too large to be code or its data.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MOST_FILE_BYTES = 64 * 2**20
"""A larger file is left out and named: weights and data sets belong on a shared path."""
MOST_LOOSE_BYTES, MOST_LOOSE_FILES = 32 * 2**20, 2000
"""Up to here the whole folder of a single file travels with it."""

_KEYS = (
    *(".env", ".env.*", "*.env", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_ed25519*", "id_ecdsa*"),
)
_JUNK = ("*.pyc", "*.egg-info", "node_modules")
_NEVER_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")


@dataclass
class Tree:
    """The files of a folder that travel, with their sizes in bytes."""

    files: dict[Path, int] = field(default_factory=dict)
    too_large: list[Path] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def is_moderate(self) -> bool:
        """Whether it may travel although nobody asked for the whole folder."""
        return len(self.files) <= MOST_LOOSE_FILES and self.size <= MOST_LOOSE_BYTES


class LeftOut:
    """What stays because somebody said so.

    Args:
        folders: folders that are passed over where they are met, such as those of runs.
        patterns: as in `runtime_env.exclude`: files and folders from here (`data/raw`, with `*`
            where wanted), or names with a `*` and without a slash (`*.ckpt`), wherever they lie.
    """

    def __init__(self, folders: Iterable[Path] = (), patterns: Iterable[str] = ()) -> None:
        self._paths = {str(folder.absolute()) for folder in folders}
        self._names: list[str] = []
        self._globs: list[str] = []
        for pattern in patterns:
            if "/" not in pattern and any(sign in pattern for sign in "*?["):
                self._names.append(pattern)
            else:
                self._globs.append(os.path.abspath(os.path.expanduser(pattern)))

    def names(self, path: Path) -> bool:
        """Whether this very file or folder was named."""
        return str(path) in self._paths or self._matches(path)

    def covers(self, path: Path) -> bool:
        """Whether a pattern names it, or a folder that it lies in."""
        return any(self._matches(part) for part in (path, *path.parents))

    def _matches(self, path: Path) -> bool:
        named = any(fnmatch.fnmatchcase(path.name, name) for name in self._names)
        # Part by part: a `*` stands for names, not for folders.
        return named or any(str(path) == glob or path.match(glob) for glob in self._globs)


def tree_of(folder: Path, skip: LeftOut, most_files: int | None = None) -> Tree:
    """The files below `folder` that travel. Gives up (early, with what it has) after more than
    `most_files`."""
    tree = Tree()
    for path in _walk(folder, skip, frozenset()):
        try:
            size = path.stat().st_size
        except OSError:
            continue  # a dangling link
        if size > MOST_FILE_BYTES:
            tree.too_large.append(path)
            continue
        tree.files[path] = size
        if most_files is not None and len(tree.files) > most_files:
            break
    return tree


def travels(name: str) -> bool:
    """Whether a file or folder of this name is sent where its folder is."""
    compiled = name.endswith(tuple(EXTENSION_SUFFIXES))
    junk = any(fnmatch.fnmatch(name, never) for never in _JUNK)
    return not (name.startswith(".") or holds_keys(name) or compiled or junk)


def holds_keys(name: str) -> bool:
    """Whether files of this name usually hold keys; these are never sent."""
    return any(fnmatch.fnmatch(name, never) for never in _KEYS)


def is_private(path: Path, bases: Iterable[Path]) -> bool:
    """Whether a named file or folder is hidden, or holds keys by its name, or lies in a folder
    that is, seen from every one of `bases`. That these themselves may lie in one is no matter."""
    return all(
        any(part.startswith(".") or holds_keys(part) for part in _below(path, base))
        for base in bases
    )


def _below(path: Path, base: Path) -> tuple[str, ...]:
    """The parts of `path` below the last folder that it has in common with `base`."""
    common = os.path.commonpath([path, base])
    return path.relative_to(common).parts or path.parts[-1:]


def _walk(folder: Path, skip: LeftOut, above: frozenset[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:  # a link that leads back; one to a folder beside it is another name for that
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    if names & set(_ENVIRONMENT_MARKS):
        return
    for entry in entries:
        path = folder / entry.name
        if not travels(entry.name) or skip.names(path):
            continue
        if entry.is_dir():
            if entry.name not in _NEVER_FOLDERS:
                yield from _walk(path, skip, above | {real})
        elif entry.is_file():
            yield path
