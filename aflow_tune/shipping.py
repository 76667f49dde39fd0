"""How user code reaches processes that cannot see the user's folders.

`gather` follows the imports of the run's modules through the user's own files (nothing is run) and
takes along the folders that they are imported from. `write_bundle` copies these into one folder, in
which every file keeps its whole path: Ray's `py_modules` carries it. `arrive` imports from there,
before anything of the same name. On one machine the manifest leads to the files in place.

Installed is the standard library, whatever lies in `site-packages` or `dist-packages`, and this
package. All else is the user's, also what `pip install -e` installed: only this machine has it.
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

VARIABLE = "AFLOW_TUNE_SHIPMENT"  # the bundle's name, on `sys.path`, or a manifest's path
MANIFEST = "manifest.json"
MAIN = "__main__"
MOST_FILE_BYTES = 64 * 2**20
MOST_FOLDER_BYTES, MOST_FOLDER_FILES = 32 * 2**20, 2000  # up to here it travels whole

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
    """What of the user's has to travel, and what has to be there."""

    modules: dict[str, Path] = field(default_factory=dict)
    """The user's modules by name: their files, or `__init__.py`."""
    folders: dict[Path, set[Path]] = field(default_factory=dict)
    """Folders that these are imported from; for each the packages and files in it that are."""
    files: set[Path] = field(default_factory=set)
    needs: dict[str, str] = field(default_factory=dict)
    """Installed top-level packages to where they are imported, `file:line`."""
    variables: set[str] = field(default_factory=set)
    """Environment variables of this process that the code names."""
    warnings: list[str] = field(default_factory=list)

    def take(self, path: Path, stays: LeftOut) -> None:
        """Let a file, or what travels of a folder, go along."""
        found = files_below(path, stays) if path.is_dir() else [(path, path.stat().st_size)]
        for file, size in found:
            if os.access(file, os.R_OK) and str(file).isprintable() and size <= MOST_FILE_BYTES:
                self.files.add(file)
            else:
                why = "it cannot be read, or is too large to travel"
                self.warnings.append(f"{str(file)!a} stays here: {why}")


class LeftOut:
    """What stays because somebody said so: `folders`, and `patterns` as in `runtime_env.exclude`:
    paths from here (`data/raw`), or names with a `*` and without a slash, wherever they lie."""

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
    """What the modules of these dotted names (`__main__`: functions of it are sent by value) need
    on another machine. `texts`: in what is sent by value; names of variables may be among them.
    `include`: travels although nothing imports it. BadInput: something of that is not there."""
    code, stays = Code(variables={*texts} & os.environ.keys()), stays or LeftOut()
    _follow(code, modules)
    here = Path.cwd()  # code finds its data from there
    if any(folder.is_relative_to(here) for folder in code.folders):
        code.folders.setdefault(here, set())
    for folder, own in code.folders.items():
        # One more than is allowed tells that it is too large; the rest need not be looked at.
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
    """Note the user's modules among these, and those that their files import."""
    read: set[Path] = set()
    waiting = [(name, "") for name in sorted(set(modules), reverse=True)]
    while waiting:
        dotted, where = waiting.pop()
        parts = dotted.split(".")
        for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            file, package = _file_of(name)
            if file is None:
                continue
            own = file.is_file() and not is_installed(file)  # what is in an archive is nobody's
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
    """The file of a module and its package, '' for none; no file where it has none."""
    if name == MAIN:
        module: Any = sys.modules[MAIN]
        file = getattr(module, "__file__", None) or "notebook"  # stands for its folder
        return Path(file).absolute(), str(getattr(module, "__package__", None) or "")
    spec = find_module(name)
    if spec is None or spec.origin in (None, "built-in", "frozen", "namespace"):
        return None, ""
    is_package = spec.submodule_search_locations is not None
    return Path(str(spec.origin)).absolute(), name if is_package else name.rpartition(".")[0]


def _imports(file: Path, package: str, variables: set[str]) -> list[tuple[str, str]]:
    """The absolute names that a file imports, with the place where it cannot do without; adds to
    the environment variables that it names."""
    try:
        waiting: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_bytes()), True)]
    except (SyntaxError, ValueError, OSError, RecursionError):  # importing it tells
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
            with contextlib.suppress(ImportError):  # it goes above the top: importing tells
                absolute = importlib.util.resolve_name(name, package or None)
                where = f"{file}:{getattr(node, 'lineno', 0)}" if needed else ""
                found += [(absolute, where)] if absolute else []
        # What stands in one of these the file may do without.
        needed = needed and not isinstance(node, (ast.If, ast.Try, ast.With))
        waiting += [(child, needed) for child in ast.iter_child_nodes(node)]
    return found


def files_below(
    folder: Path, stays: LeftOut, above: frozenset[str] = frozenset()
) -> Iterator[tuple[Path, int]]:
    """The files below a folder, with their sizes in bytes, but for `_NEVER` and environments."""
    real = os.path.realpath(folder)
    if real in above:  # a link that leads back; one to a folder beside it is another name for that
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
    """Where this process has, or would find, a module; nothing is imported."""
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
    """Whether this absolute path belongs to what is installed."""
    below = any(path.is_relative_to(place) for place in _INSTALLED_FOLDERS)
    return below or bool({*_INSTALLED} & {*path.parts})


def holds_keys(name: str) -> bool:
    """Whether files of this name usually hold keys."""
    return any(fnmatch.fnmatch(name, never) for never in _KEYS)


def manifest_of(code: Code) -> bytes:
    """What `arrive` has to know."""
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
    """Copy what was gathered into a new folder of `folder`, named after its content, with `extra`
    files by name; returns it. `secrets`: values, by the names of their variables, that no file may
    hold: clusters keep what is uploaded on disk. BadInput: one does, or cannot be read."""
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
        if path.stat().st_mode & 0o100:  # a program that the code starts
            copy.chmod(copy.stat().st_mode | 0o100)
    if faults:
        raise BadInput("The code of this run cannot travel to the workers.", faults)
    # Relative paths of the configuration and the code are from here; archives drop empty folders.
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
    """A fault for every secret whose value is among these bytes; the value is not shown."""
    for name, value in sorted(secrets.items()):
        if value.encode() in content:
            yield Fault(where, "no keys: clusters keep what is sent", f"the value of {name}", cure)


@dataclass
class Arrival(importlib.abc.MetaPathFinder):
    """A shipment in this process; finds the user's top-level modules."""

    base: Path | None
    """Where the files' former paths begin; None where they lie in their own places."""
    modules: dict[str, str]
    """Top-level ones with their files."""
    folders: list[str]
    roots: list[str]
    cwd: str
    conflicts: list[str] = field(default_factory=list)

    def here(self, path: str) -> str:
        """Where a file or folder of the user's machine lies here."""
        return path if self.base is None else str(self.base / path.lstrip("/"))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        file = self.here(self.modules[name])
        below = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=below)


_arrived: Arrival | None = None


def arrive(shipment: str | None = None) -> Arrival | None:
    """Make the shipment that this process is told of importable; None where there is none.
    FileNotFoundError: it is named, but not to be found."""
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
    """The shipment of this process, if there is one. BadInput: a module of the user's has the name
    of one that this worker had loaded already."""
    for found in conflicts():
        where, title = f"process {os.getpid()}", "A worker had loaded modules with your names."
        raise BadInput.of(title, where, "your modules", found, "rename your module")
    return _arrived


def is_submitted() -> bool:
    """Whether the user's code was copied to this process's machine."""
    return _arrived is not None and _arrived.base is not None


def conflicts() -> list[str]:
    """What this process had imported under the names of the user's modules before they came."""
    return [] if _arrived is None else list(_arrived.conflicts)


def travelled(named: str) -> str:
    """A path of the settings, or `path/file.py:name`, as it is called here: in a submitted job what
    travelled lies elsewhere than on the user's machine."""
    file, colon, name = named.rpartition(":") if ".py:" in named else (named, "", "")
    arrival, path = arrived(), os.path.normpath(os.path.expanduser(file))
    if arrival is None or arrival.base is None or not path.startswith("/"):
        return named
    inside = any(path == root or path.startswith(f"{root}/") for root in arrival.roots)
    moved = arrival.here(path)
    return f"{moved}{colon}{name}" if inside and os.path.exists(moved) else named


def path_here(path: str) -> Path:
    """As `travelled`."""
    return Path(travelled(path))
