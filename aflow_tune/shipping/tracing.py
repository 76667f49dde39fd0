"""Everything that user code needs on another machine, found without running any of it.

From the modules behind the given objects, imports are followed through the user's own files.
A package travels whole, since code also finds siblings and data by name; a single file takes
its folder along where that is small, and else what it imports and the files that it names.
Installed packages do not travel: `Trace.needs` says which of them must be there.

A compiled module of the user's cannot travel: it belongs to this machine's Python and platform.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import Any

from aflow_tune.errors import Fault
from aflow_tune.shipping.origin import editable_records, is_installed
from aflow_tune.shipping.reach import MAIN, MOST_OBJECTS, reach
from aflow_tune.shipping.reading import Import, read_file
from aflow_tune.shipping.trees import (
    MOST_FILE_BYTES,
    MOST_LOOSE_FILES,
    LeftOut,
    holds_keys,
    is_private,
    tree_of,
)

MOST_BYTES = 400 * 2**20
"""Ray takes packages of up to 512 MiB."""


@dataclass(frozen=True)
class Place:
    """Where a top-level module of the user's lies."""

    file: Path | None
    """Its file, or its `__init__.py`; None for a namespace package."""
    folders: tuple[Path, ...] | None = None
    """For packages: where its submodules are searched."""


@dataclass
class Trace:
    """What has to travel, and what has to be there."""

    modules: dict[str, Place] = field(default_factory=dict)
    """The user's top-level modules by the names they are imported under."""
    files: dict[Path, int] = field(default_factory=dict)
    """Files that travel, with their sizes in bytes."""
    needs: dict[str, str] = field(default_factory=dict)
    """Installed top-level packages to where they are imported, `file:line`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables to where they are read, `file:line`."""
    without_file: list[str] = field(default_factory=list)
    """Modules that were made in memory: they can only be sent by value."""
    folders: list[Path] = field(default_factory=list)
    """Folders that this process imports the user's code from."""
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def trace(
    objects: Iterable[Any] = (),
    modules: Iterable[str] = (),
    include: Iterable[Path] = (),
    skip: Iterable[Path] = (),
    exclude: Iterable[str] = (),
) -> Trace:
    """Trace what `objects` (functions, classes, objects with a `__call__`) need.

    Args:
        modules: further modules by name, such as those that a configuration names.
        include: files and folders that travel although nothing names them.
        skip: folders that stay, such as those of runs.
        exclude: what stays, as in `trees.LeftOut`.
    """
    tracer = _Tracer(LeftOut(skip, exclude))
    for path in include:
        tracer.include(Path(os.path.abspath(path)))
    reached = reach(objects)
    if not reached.complete:
        tracer.found.faults.append(_too_many())
    for name in sorted({*reached.modules, *modules}):
        tracer.module(Import(name, 0), "")
    tracer.work()
    for place in sorted(reached.places):
        tracer.cell(place)
    for path in sorted(reached.paths):
        tracer.held(path)
    tracer.close()
    return tracer.found


class _Tracer:
    def __init__(self, skip: LeftOut) -> None:
        self.found = Trace()
        self.skip = skip
        self._waiting: list[tuple[str, Path, str]] = []  # name, file, package
        self._seen: set[str] = set()
        self._trees: set[Path] = set()

    def work(self) -> None:
        """Read the files that are waiting, and those that they lead to."""
        while self._waiting:
            _, file, package = self._waiting.pop()
            reading = read_file(file, package)
            for item in reading.imports:
                self.module(item, f"{file}:{item.line}")
            for name, line in reading.variables.items():
                self.found.variables.setdefault(name, f"{file}:{line}")
            for path in reading.paths:
                self._named(path, file)

    def cell(self, place: str) -> None:
        """Read code that is in no file, such as the cell of a notebook: what it names. Its imports
        are seen on the functions themselves."""
        if not os.path.exists(place) and (source := "".join(linecache.getlines(place))):
            reading = read_file(Path(place), "", source)
            for name, line in reading.variables.items():
                self.found.variables.setdefault(name, f"{place}:{line}")
            for path in reading.paths:
                self._named(path, Path.cwd() / Path(place).name)

    def module(self, item: Import, where: str) -> None:
        """Follow one import; `where` is empty for a module that an object came from."""
        if item.name in self._seen and not where:
            return
        top, _, rest = item.name.partition(".")
        if top in self.found.modules or self._enter(top, item, where):
            self._submodule(top, rest, item, where)

    def include(self, path: Path) -> None:
        """Let a file, or all of a folder, travel: the user asked for it by name."""
        if holds_keys(path.name):
            self._stays(path)
        elif path.is_dir():
            self._tree(path, asked=True)
        elif path.is_file():
            self.found.files[path] = path.stat().st_size
        else:
            self.found.faults.append(
                Fault(str(path), "a file or folder", "nothing there", "correct the path")
            )

    def held(self, path: Path) -> None:
        """Take along a path that an object holds: a file, or a folder of a moderate size."""
        if not (is_installed(path) or path in self._trees or self.skip.covers(path)):
            if is_private(path, [Path.cwd(), *self.found.folders]):
                self._stays(path)
            else:
                self._moderate(path)

    def close(self) -> None:
        """What can be said once everything is found."""
        found = self.found
        places = [(place.file, *(place.folders or ())) for place in found.modules.values()]
        for path in editable_records(path for place in places for path in place if path):
            found.files[path] = path.stat().st_size
            self._imports_from(path.parent.parent)
        for path in [path for path in found.files if not os.access(path, os.R_OK)]:
            del found.files[path]
            found.warnings.append(f"{path} stays here: it cannot be read")
        for path in [path for path in found.files if not str(path).isprintable()]:
            if str(path) != str(path).encode(errors="replace").decode():
                del found.files[path]
                found.warnings.append(f"{str(path)!a} stays here: its name is no UTF-8")
        found.warnings = list(dict.fromkeys(found.warnings))
        found.faults += too_much(found.files)

    def _named(self, path: Path, file: Path) -> None:
        """Take along what the code of `file` names."""
        if is_installed(path) or path in self._trees or self.skip.covers(path):
            return
        if is_private(path, [file.parent, Path.cwd()]):
            self._stays(path)
        elif not self._moderate(path):
            self.found.warnings.append(
                f"{path}, which {file} names, is too large to travel: put it on a path that every "
                "node sees, or list what is needed of it under `runtime_env: {include: [...]}`"
            )

    def _moderate(self, path: Path) -> bool:
        """Let a file or folder travel unless it is large; whether it does."""
        if path.is_file():
            size = path.stat().st_size
            if size <= MOST_FILE_BYTES:
                self.found.files[path] = size
            return size <= MOST_FILE_BYTES
        tree = tree_of(path, self.skip, MOST_LOOSE_FILES)
        if tree.is_moderate:
            self.found.files |= tree.files
        return tree.is_moderate

    def _stays(self, path: Path) -> None:
        self.found.warnings.append(
            f"{path} stays here: hidden files and those that hold keys by their name are never "
            "sent; keys go by name: `runtime_env: {secrets: [NAME]}`"
        )

    def _enter(self, top: str, item: Import, where: str) -> bool:
        """Take a top-level module over; False where it is not the user's."""
        if top == MAIN:
            self._main()
            return False
        spec = _spec(top)
        if spec is None:
            module = sys.modules.get(top)
            made = module is not None and getattr(module, "__file__", None) is None
            made = made and not getattr(module, "aflow_tune_stand_in", False)
            if made and top not in sys.builtin_module_names and top not in self.found.without_file:
                self.found.without_file.append(top)
            return False
        if spec.origin in ("built-in", "frozen"):
            return False
        if spec.submodule_search_locations is not None and not _has_file(spec):
            return self._namespace(top, spec, item, where)
        file = Path(str(spec.origin)).absolute()
        if is_installed(file) and not top.startswith("_aflow_tune_"):
            self._need(top, item, where)
            return False
        if not file.is_file():
            if not item.optional:
                self.found.faults.append(_in_archive(top, file, where))
            return False
        if file.name.endswith(tuple(EXTENSION_SUFFIXES)):
            self._compiled(top, file, item, where)
            return False
        if spec.submodule_search_locations is not None:
            folders = tuple(Path(place).absolute() for place in spec.submodule_search_locations)
            self.found.modules[top] = Place(file, folders)
            for folder in folders:
                self._tree(folder)
            self._imports_from(file.parent.parent)
            self._read(top, file, top)
        else:
            self.found.modules[top] = Place(file)
            self._loose(file)
            self._read(top, file, "")
        return True

    def _main(self) -> None:
        """The script itself is sent by value; what it imports travels."""
        module = sys.modules.get(MAIN)
        file = getattr(module, "__file__", None)
        if MAIN in self._seen or file is None or is_installed(path := Path(file).absolute()):
            return
        if not path.is_file():
            return
        package = str(getattr(module, "__package__", "") or "")
        if package:
            self.module(Import(package, 0), "")
        else:
            self._loose(path)
        self._read(MAIN, path, package)

    def _namespace(self, top: str, spec: ModuleSpec, item: Import, where: str) -> bool:
        places = [Path(place).absolute() for place in spec.submodule_search_locations or ()]
        own = [place for place in places if not is_installed(place)]
        if not own:
            self._need(top, item, where)
            return False
        self.found.modules[top] = Place(None, tuple(own))
        for place in own:
            self._tree(place)
            self._imports_from(place.parent)
        return True

    def _submodule(self, top: str, rest: str, item: Import, where: str) -> None:
        """Read the file behind `top.rest`, if it is one of the user's."""
        self._seen.add(item.name)
        folders = self.found.modules[top].folders or ()
        name = top
        for part in rest.split(".") if rest else ():
            name = f"{name}.{part}"
            package = [f / part / "__init__.py" for f in folders]
            files = [f / f"{part}.py" for f in folders]
            compiled = [f / f"{part}{suffix}" for f in folders for suffix in EXTENSION_SUFFIXES]
            if file := next((path for path in package if path.is_file()), None):
                self._read(name, file, name)
                folders = (file.parent,)
            elif file := next((path for path in compiled if path.is_file()), None):
                self._compiled(name, file, item, where)
                return
            elif file := next((path for path in files if path.is_file()), None):
                self._read(name, file, name.rpartition(".")[0])
                folders = ()
            else:
                folders = tuple(f / part for f in folders if (f / part).is_dir())
            if not folders:
                return

    def _read(self, name: str, file: Path, package: str) -> None:
        key = f"{name} {file}"
        if key not in self._seen:
            self._seen |= {key, name}
            self.found.files.setdefault(file, file.stat().st_size)
            self._waiting.append((name, file, package))

    def _loose(self, file: Path) -> None:
        """A single file: with its folder, if that is small enough to be a project."""
        folder = file.parent
        self._imports_from(folder)
        self.found.files[file] = file.stat().st_size
        if folder in self._trees or self.skip.covers(folder):
            return
        self._trees.add(folder)
        tree = tree_of(folder, self.skip, MOST_LOOSE_FILES)
        if not tree.is_moderate:
            self.found.warnings.append(
                f"{folder} is too large to travel with {file.name}: only the modules that it "
                "imports and the files that it names go along; list others under "
                "`runtime_env: {include: [...]}`"
            )
            return
        self.found.files |= tree.files

    def _tree(self, folder: Path, asked: bool = False) -> None:
        if folder in self._trees or (self.skip.covers(folder) and not asked):
            return
        self._trees.add(folder)
        tree = tree_of(folder, self.skip)
        self.found.files |= tree.files
        self.found.warnings += [
            f"{path} is too large to travel ({path.stat().st_size / 2**20:.0f} MiB): put it on a "
            "path that every node sees"
            for path in tree.too_large
        ]

    def _imports_from(self, folder: Path) -> None:
        if folder not in self.found.folders:
            self.found.folders.append(folder)

    def _need(self, top: str, item: Import, where: str) -> None:
        ours = top == "aflow_tune" or top in sys.stdlib_module_names
        if where and not item.optional and not item.maybe and not ours:
            self.found.needs.setdefault(top, where)

    def _compiled(self, name: str, file: Path, item: Import, where: str) -> None:
        known = {fault.found for fault in self.found.faults}
        found = f"{file}, compiled for this machine's Python and platform"
        if item.optional or found in known or file in self.found.files:
            return
        self.found.faults.append(
            Fault(
                where or name,
                f"`{name}` in a form that can travel to other nodes",
                found,
                "build a wheel of it and install that on every node, or name it under "
                "`runtime_env: {pip: [...]}`; where all nodes are like this machine, "
                f"`runtime_env: {{include: [{file}]}}` sends the file",
            )
        )


def _spec(name: str) -> ModuleSpec | None:
    """Where this process has, or would find, a top-level module; it is not imported."""
    module = sys.modules.get(name)
    if module is not None:
        spec = getattr(module, "__spec__", None)
        if spec is not None:
            return spec
        file = getattr(module, "__file__", None)
        return importlib.util.spec_from_file_location(name, file) if file else None
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _has_file(spec: ModuleSpec) -> bool:
    return spec.origin is not None and spec.origin != "namespace"


def _in_archive(top: str, file: Path, where: str) -> Fault:
    return Fault(
        where or top,
        f"`{top}` as a file or folder",
        f"{file}, which is inside an archive or gone",
        "unpack it, or install it on every node",
    )


def too_much(files: dict[Path, int]) -> list[Fault]:
    """A fault where these files, with their sizes in bytes, are more than can be sent."""
    total = sum(files.values())
    if total <= MOST_BYTES:
        return []
    largest = sorted(files, key=lambda path: -files[path])[:5]
    listed = ", ".join(f"{path} ({files[path] / 2**20:.0f} MiB)" for path in largest)
    found = f"{total / 2**20:.0f} MiB; the largest: {listed}"
    cure = "keep data out of packages: put it on a path that every node sees"
    most = f"at most {MOST_BYTES / 2**20:.0f} MiB"
    return [Fault("the code and data that travel to the workers", most, found, cure)]


def _too_many() -> Fault:
    return Fault(
        "what the functions hold",
        f"at most {MOST_OBJECTS:,} objects, so that all code among them is found",
        "more",
        "load data inside the function, or from a file, instead of holding it in closures, "
        "partials and globals",
    )
