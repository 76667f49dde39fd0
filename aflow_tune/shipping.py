"""How user code reaches processes that cannot see the user's folders.

`gather` follows the imports of the run's modules through the user's files, without running them,
and collects the folders that they are imported from. `write_bundle` copies these into one folder in
which every file keeps its absolute path; Ray's `py_modules` carries it. `arrive` makes the user's
modules importable from there, ahead of others of the same name. On one machine nothing is copied.

The standard library, everything in `site-packages` or `dist-packages`, and this package count as
installed. All else is the user's, including what `pip install -e` linked: only this machine has it.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import hashlib
import importlib.abc
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

VARIABLE = "AFLOW_TUNE_SHIPMENT"  # the name of a bundle on `sys.path`, or a manifest's path
MANIFEST = "manifest.json"
MAIN = "__main__"
MOST_FILE_BYTES = 64 * 2**20
MOST_FOLDER_BYTES, MOST_FOLDER_FILES = 32 * 2**20, 2000  # a larger folder is not sent whole

_PREFIX, _FILES, _MARK = "aflow_tune_shipment_", "files", ".aflow-tune"
_KEYS = (
    *(".env", ".env.*", "*.env", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_ed25519*", "id_ecdsa*"),
)
_INSTALLED = ("site-packages", "dist-packages")
_OWN_FOLDERS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_OWN_FOLDERS.append(Path(__file__).absolute().parent)
_INSTALLED_FOLDERS = {*_OWN_FOLDERS, *(path.resolve() for path in _OWN_FOLDERS)}
_NEVER = (".*", *_KEYS, *_INSTALLED, "*.pyc", "*.egg-info", "node_modules", "__pycache__")
_ENVIRONMENT_MARKS = {"pyvenv.cfg", "conda-meta"}


@dataclass
class Code:
    """What has to be sent of the user's code, and what has to be installed or set."""

    modules: dict[str, Path] = field(default_factory=dict)
    """The user's modules by name: their files (`__init__.py` of a package)."""
    folders: dict[Path, set[Path]] = field(default_factory=dict)
    """Folders that these are imported from, with the packages and files imported from each."""
    files: set[Path] = field(default_factory=set)
    needs: dict[str, str] = field(default_factory=dict)
    """Installed top-level packages, with the `file:line` that imports each."""
    variables: set[str] = field(default_factory=set)
    """Environment variables, set in this process, whose names stand in the code."""
    warnings: list[str] = field(default_factory=list)

    def take(self, path: Path, stays: LeftOut) -> None:
        """Add a file, or the files of a folder that may be sent."""
        found = files_below(path, stays) if path.is_dir() else [(path, path.stat().st_size)]
        for file, size in found:
            if os.access(file, os.R_OK) and str(file).isprintable() and size <= MOST_FILE_BYTES:
                self.files.add(file)
            else:
                why = "it cannot be read, or is too large to travel"
                self.warnings.append(f"{str(file)!a} stays here: {why}")


class LeftOut:
    """What is not sent: `folders`, and `patterns` as in `runtime_env.exclude`: paths relative to
    the current folder (`data/raw`), or names with a wildcard and no slash, which match anywhere."""

    def __init__(self, folders: Iterable[Path] = (), patterns: Iterable[str] = ()) -> None:
        self._names = [name for name in patterns if "/" not in name and set("*?[") & set(name)]
        paths = [*(name for name in patterns if name not in self._names), *map(str, folders)]
        self._paths = [os.path.abspath(os.path.expanduser(path)) for path in paths]

    def covers(self, path: Path) -> bool:
        return any(fnmatch.fnmatchcase(path.name, name) for name in self._names) or any(
            str(path) == named or path.match(named) for named in self._paths
        )


def gather(
    modules: Iterable[str],
    texts: Iterable[str] = (),
    include: Iterable[Path] = (),
    stays: LeftOut | None = None,
) -> Code:
    """What these modules, by dotted name, need on another machine. `__main__` stands for functions
    that are pickled by value, `texts` for the strings in them, which may name environment
    variables. `include`: sent although nothing imports it. BadInput: a path of it is missing."""
    code, stays = Code(variables={*texts} & os.environ.keys()), stays or LeftOut()
    _follow(code, modules)
    here = Path.cwd()  # code opens its data relative to it
    if any(folder.is_relative_to(here) for folder in code.folders):
        code.folders.setdefault(here, set())
    for folder, own in code.folders.items():
        # One file more than allowed shows that it is too large; do not walk the rest.
        sizes = [size for _, size in islice(files_below(folder, stays), MOST_FOLDER_FILES + 1)]
        small = sum(size for size in sizes if size <= MOST_FILE_BYTES) <= MOST_FOLDER_BYTES
        whole = small and len(sizes) <= MOST_FOLDER_FILES
        for path in [folder] if whole else own:
            code.take(path, stays)
        if not whole:
            why = "is too large: what is imported from there travels, and `runtime_env.include`"
            code.warnings.append(f"{folder} {why}")
    for path in (Path(os.path.abspath(path)) for path in include):
        if holds_keys(path.name):
            code.warnings.append(f"{path} stays here: files that hold keys are never sent")
        elif path.exists():
            code.take(path, stays)
        else:
            title, found = "The code of this run cannot travel to the workers.", "nothing there"
            raise BadInput.of(title, str(path), "a file or folder", found, "correct the path")
    return code


def _follow(code: Code, modules: Iterable[str]) -> None:
    """Add to `code` the user's modules among these and, recursively, those that they import."""
    read: set[Path] = set()
    waiting = [(name, "") for name in sorted(set(modules), reverse=True)]
    while waiting:
        dotted, where = waiting.pop()
        parts = dotted.split(".")
        for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            file, package = _file_of(name)
            if file is None:
                continue
            own = file.is_file() and not is_installed(file)  # not a file: inside an archive
            if not own and not name.startswith("_aflow_tune_") and name != MAIN:
                if where and parts[0] not in {"aflow_tune", *sys.stdlib_module_names}:
                    code.needs.setdefault(parts[0], where)
                break
            if name != MAIN:
                code.modules[name] = file
            parent = file.parents[package.count(".") + 1] if package else file.parent
            top = parent / file.relative_to(parent).parts[0]
            code.folders.setdefault(parent, set()).add(top)
            if file.is_file() and file not in read:
                read.add(file)
                waiting += _imports(file, package, code.variables)


def _file_of(name: str) -> tuple[Path | None, str]:
    """The file of a module (None if it has none) and its package ('' if it is in none)."""
    if name == MAIN:
        module: Any = sys.modules[MAIN]
        file = getattr(module, "__file__", None) or "notebook"  # only its folder is used
        return Path(file).absolute(), str(getattr(module, "__package__", None) or "")
    spec = find_module(name)
    if spec is None or spec.origin in (None, "built-in", "frozen", "namespace"):
        return None, ""
    is_package = spec.submodule_search_locations is not None
    return Path(str(spec.origin)).absolute(), name if is_package else name.rpartition(".")[0]


def _imports(file: Path, package: str, variables: set[str]) -> list[tuple[str, str]]:
    """The absolute names that a file imports, each with `file:line`, or '' if the import is
    conditional. Adds the environment variables that the file names to `variables`."""
    try:
        waiting: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_bytes()), True)]
    except (SyntaxError, ValueError, OSError, RecursionError):  # reported when imported
        return []
    found: list[tuple[str, str]] = []
    while waiting:
        node, needed = waiting.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            joint = "" if base.endswith(".") else "."
            names = [base, *(f"{base}{joint}{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names = [str(first.value)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            variables |= {node.value} & os.environ.keys()
        for name in names:
            with contextlib.suppress(ImportError):  # beyond the top package: reported when imported
                absolute = importlib.util.resolve_name(name, package or None)
                where = f"{file}:{getattr(node, 'lineno', 0)}" if needed else ""
                found += [(absolute, where)] if absolute else []
        # Imports inside of these are optional.
        needed = needed and not isinstance(node, (ast.If, ast.Try, ast.With))
        waiting += [(child, needed) for child in ast.iter_child_nodes(node)]
    return found


def files_below(
    folder: Path, stays: LeftOut, above: frozenset[str] = frozenset()
) -> Iterator[tuple[Path, int]]:
    """The files below a folder with their sizes in bytes, without `_NEVER` and environments."""
    real = os.path.realpath(folder)
    if real in above:  # a link to a folder above; other links are followed
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if {entry.name for entry in entries} & _ENVIRONMENT_MARKS:
        return
    for entry in entries:
        path = folder / entry.name
        if any(fnmatch.fnmatch(entry.name, never) for never in _NEVER) or stays.covers(path):
            continue
        if entry.is_dir():
            yield from files_below(path, stays, above | {real})
        elif entry.is_file():
            yield path, entry.stat().st_size


def find_module(name: str) -> ModuleSpec | None:
    """The spec of a module as this process would import it, without importing anything; or None."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        file = getattr(sys.modules.get(top), "__file__", None)
        spec = importlib.util.spec_from_file_location(top, file) if file else None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def is_installed(path: Path) -> bool:
    """Whether this absolute path is installed, as the module docstring defines it."""
    below = any(path.is_relative_to(place) for place in _INSTALLED_FOLDERS)
    return below or bool({*_INSTALLED} & {*path.parts})


def holds_keys(name: str) -> bool:
    """Whether a file of this name usually holds keys."""
    return any(fnmatch.fnmatch(name, never) for never in _KEYS)


def manifest_of(code: Code) -> bytes:
    """The JSON that `arrive` reads: modules, folders for `sys.path`, roots, current folder."""
    importing = dict.fromkeys(Path(entry or ".").absolute() for entry in sys.path)
    own = [folder for folder in importing if folder.is_dir() and not is_installed(folder)]
    told = {
        "modules": {name: str(file) for name, file in code.modules.items() if "." not in name},
        "folders": list(dict.fromkeys(str(folder) for folder in [*own, *code.folders])),
        "roots": sorted({str(path) for path in code.folders} | {str(p.parent) for p in code.files}),
        "cwd": str(Path.cwd()),
    }
    return json.dumps(told, indent=1, sort_keys=True).encode()


def write_bundle(
    code: Code,
    folder: Path,
    extra: Mapping[str, bytes] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> Path:
    """Copy what was gathered, and `extra` files by name, into a folder in `folder` that is named by
    a hash of the content; returns it. `secrets`: values, by variable, that no file may hold, since
    clusters keep uploads on disk. BadInput: a file holds one, or cannot be read."""
    faults: list[Fault] = []
    digest = hashlib.sha256()
    growing = folder / f".growing-{os.getpid()}"
    (growing / _FILES).mkdir(parents=True)
    for name, content in sorted({MANIFEST: manifest_of(code), **(extra or {})}.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        (growing / name).write_bytes(content)
    leave = "leave it out: `runtime_env: {exclude: [...]}`"
    for path in sorted(code.files):
        try:
            content = path.read_bytes()
        except OSError as error:
            faults.append(Fault(str(path), "a file that can be read", str(error), leave))
            continue
        faults += secrets_in(content, secrets or {}, str(path), f"take the key out, or {leave}")
        digest.update(os.fsencode(path) + b"\0" + hashlib.sha256(content).digest())
        copy = growing / _FILES / str(path).lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        if path.stat().st_mode & 0o100:  # an executable that the code may start
            copy.chmod(copy.stat().st_mode | 0o100)
    if faults:
        raise BadInput("The code of this run cannot travel to the workers.", faults)
    # Workers start in the copy of the current folder; archives drop empty folders.
    here = growing / _FILES / str(Path.cwd()).lstrip("/")
    here.mkdir(parents=True, exist_ok=True)
    (here / _MARK).touch()
    bundle = folder / f"{_PREFIX}{digest.hexdigest()[:16]}"
    if not bundle.exists():
        growing.rename(bundle)
    return bundle


def secrets_in(
    content: bytes, secrets: Mapping[str, str], where: str, cure: str
) -> Iterator[Fault]:
    """A fault for each secret whose value is in `content`; the value is not shown."""
    for name, value in sorted(secrets.items()):
        if value.encode() in content:
            yield Fault(where, "no keys: clusters keep what is sent", f"the value of {name}", cure)


@dataclass
class Arrival(importlib.abc.MetaPathFinder):
    """A shipment that this process has taken in; finds the user's top-level modules."""

    base: Path | None
    """The folder below which files keep their absolute paths; None if they were not copied."""
    modules: dict[str, str]
    """Top-level modules with their files on the user's machine."""
    folders: list[str]
    roots: list[str]
    cwd: str
    conflicts: list[str] = field(default_factory=list)

    def here(self, path: str) -> str:
        """The path here of a file or folder of the user's machine."""
        return path if self.base is None else str(self.base / path.lstrip("/"))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        file = self.here(self.modules[name])
        below = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=below)


_arrived: Arrival | None = None


def arrive(shipment: str | None = None) -> Arrival | None:
    """Make a shipment (None: the one that `VARIABLE` names) importable, once per process; returns
    None if there is none. FileNotFoundError: it is named, but cannot be found."""
    global _arrived
    shipment = shipment or os.environ.get(VARIABLE)
    if not shipment or _arrived is not None:
        return _arrived
    folders = [Path(entry or ".").absolute() / shipment / MANIFEST for entry in sys.path]
    in_place = os.path.isabs(shipment)
    manifest = next((p for p in [Path(shipment), *folders] if p.is_file()), None)
    if manifest is None:
        raise FileNotFoundError(f"the user's code ({shipment}) did not reach this process")
    told = json.loads(manifest.read_text(encoding="utf-8"))
    arrival = Arrival(None if in_place else manifest.parent / _FILES, **told)
    for name, file in arrival.modules.items():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.modules and loaded != arrival.here(file):
            arrival.conflicts.append(f"`{name}`, imported from {loaded} before")
    sys.meta_path.insert(0, arrival)
    for folder in map(arrival.here, arrival.folders):
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)
    if not in_place and os.path.isdir(arrival.here(arrival.cwd)):
        os.chdir(arrival.here(arrival.cwd))
    _arrived = arrival
    return arrival


def arrived() -> Arrival | None:
    """The shipment of this process, or None. BadInput: this worker had already loaded a module with
    the name of one of the user's."""
    for found in conflicts():
        where, title = f"process {os.getpid()}", "A worker had loaded modules with your names."
        raise BadInput.of(title, where, "your modules", found, "rename your module")
    return _arrived


def is_submitted() -> bool:
    """Whether the user's code was copied to this process's machine."""
    return _arrived is not None and _arrived.base is not None


def conflicts() -> list[str]:
    """Modules of the same names that this process had imported before the shipment, in words."""
    return [] if _arrived is None else list(_arrived.conflicts)


def travelled(named: str) -> str:
    """A path of the settings, or `path/file.py:name`, as it is here: in a submitted job what was
    sent has another path than on the user's machine. BadInput: as `arrived`."""
    file, colon, name = named.rpartition(":") if ".py:" in named else (named, "", "")
    arrival, path = arrived(), os.path.normpath(os.path.expanduser(file))
    if arrival is None or arrival.base is None or not path.startswith("/"):
        return named
    inside = any(path == root or path.startswith(f"{root}/") for root in arrival.roots)
    moved = arrival.here(path)
    return f"{moved}{colon}{name}" if inside and os.path.exists(moved) else named


def path_here(path: str) -> Path:
    """`travelled`, for a path without a name."""
    return Path(travelled(path))
