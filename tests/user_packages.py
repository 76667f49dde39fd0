"""Projects as users write them, each a case of code that has to reach a worker.

`CASES` maps a name to files, to how the workflow is named, and to what it returns. A workflow
of a case returns 1.0 only if everything it reaches for is there. `send()` is what a driver does:
trace, bundle, pickle. `LOAD` is what a worker does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A project. `spec` is `file.py:function` for the resolver, or a script that calls `send`."""

    files: dict[str, str]
    spec: str
    environment: dict[str, str] = field(default_factory=dict)
    """What the user's shell has and the worker's does not."""

    @property
    def is_script(self) -> bool:
        return ":" not in self.spec

    def write(self, folder: Path) -> Path:
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder


ASYNC = "async def flow(task, model):\n"
CASES = {
    "beside_the_script": Case(
        {
            "flow.py": "from sibling import double\n" + ASYNC + "    return double(0.5)\n",
            "sibling.py": "from deeper import two\ndef double(x):\n    return two() * x\n",
            "deeper.py": "def two():\n    return 2\n",
        },
        "flow.py:flow",
    ),
    "data_beside_the_script": Case(
        {
            "flow.py": "from pathlib import Path\nHERE = Path(__file__).parent\n"
            + ASYNC
            + "    return float((HERE / 'data' / 'one.txt').read_text())\n",
            "data/one.txt": "1.0",
        },
        "flow.py:flow",
    ),
    "relative_imports": Case(
        {
            "kit/__init__.py": "from .core import flow\n",
            "kit/core.py": "from . import tools\nfrom .inner.deep import one\n"
            + ASYNC
            + "    return tools.same(one())\n",
            "kit/tools.py": "def same(x):\n    from .lazy import identity\n"
            "    return identity(x)\n",
            "kit/lazy.py": "def identity(x):\n    return x\n",
            "kit/inner/__init__.py": "",
            "kit/inner/deep.py": "from ..constants import ONE\ndef one():\n    return ONE\n",
            "kit/constants.py": "ONE = 1.0\n",
        },
        "kit/core.py:flow",
    ),
    "namespace_package": Case(
        {
            "spaced/left/flows.py": "from spaced.right.values import one\n"
            + ASYNC
            + "    import spaced.right.data as d\n    from importlib.resources import files\n"
            "    assert files(d).joinpath('x.txt').read_text() == 'x'\n    return one()\n",
            "spaced/right/values.py": "def one():\n    return 1.0\n",
            "spaced/right/data/x.txt": "x",
        },
        "spaced.left.flows:flow",
    ),
    "side_effects_of_init": Case(
        {
            "registry/__init__.py": "KNOWN = {}\nfrom . import plugins\n",
            "registry/plugins.py": "from registry import KNOWN\n"
            "def add(f):\n    KNOWN[f.__name__] = f\n    return f\n"
            "@add\ndef one():\n    return 1.0\n",
            "registry/run.py": "from registry import KNOWN\n"
            + ASYNC
            + "    return KNOWN['one']()\n",
        },
        "registry.run:flow",
    ),
    "package_data": Case(
        {
            "stocked/__init__.py": "",
            "stocked/flows.py": "import importlib.resources as r\nimport json\nimport os\n"
            "from pathlib import Path\nimport pkgutil\n"
            "def _open(n):\n    return open(os.path.join(os.path.dirname(__file__), n))\n"
            + ASYNC
            + "    a = json.loads(r.files('stocked').joinpath('data/a.json').read_text())\n"
            "    b = json.loads((Path(__file__).parent / 'data' / 'a.json').read_text())\n"
            "    c = json.loads(pkgutil.get_data('stocked', 'data/a.json'))\n"
            "    d = json.load(_open('data/a.json'))\n"
            "    return sum([a, b, c, d]) / 4\n",
            "stocked/data/a.json": "1.0",
        },
        "stocked.flows:flow",
    ),
    "data_above_the_package": Case(
        {
            "src/above/__init__.py": "",
            "src/above/flows.py": "from pathlib import Path\n"
            "ROOT = Path(__file__).resolve().parents[2]\n"
            + ASYNC
            + "    return float((ROOT / 'assets' / 'one.txt').read_text())\n",
            "assets/one.txt": "1.0",
        },
        "src/above/flows.py:flow",
    ),
    "lazy_siblings": Case(
        {
            "idle/__init__.py": "",
            "idle/flows.py": "import importlib\n" + ASYNC + "    from idle.late import one\n"
            "    name = 'fl' + 'oat'\n"
            "    other = importlib.import_module(f'idle.by_{name}')\n"
            "    return one() * other.VALUE\n",
            "idle/late.py": "def one():\n    return 1.0\n",
            "idle/by_float.py": "VALUE = 1.0\n",
        },
        "idle.flows:flow",
    ),
    "same_name_on_the_worker": Case(
        {
            "flow.py": "import json_repair_helper as h\n" + ASYNC + "    return h.VALUE\n",
            "json_repair_helper.py": "VALUE = 1.0\n",
        },
        "flow.py:flow",
    ),
    "own_classes": Case(
        {
            "shapes/__init__.py": "from .kinds import Point\n",
            "shapes/kinds.py": "from dataclasses import dataclass, field\nimport enum\n"
            "class Kind(enum.Enum):\n    A = 1\n"
            "@dataclass(frozen=True)\nclass Point:\n    x: float\n    kind: Kind = Kind.A\n",
            "shapes/flows.py": "import pickle\nfrom shapes import Point\n"
            "from shapes.kinds import Kind\nORIGIN = Point(1.0)\n"
            + ASYNC
            + "    back = pickle.loads(pickle.dumps(ORIGIN))\n"
            "    assert back == ORIGIN and isinstance(back, Point) and back.kind is Kind.A\n"
            "    return back.x\n",
        },
        "shapes.flows:flow",
    ),
    "reads_the_environment": Case(
        {
            "flow.py": "import os\nKEY = os.environ['SHIPPED_USER_KEY']\nNAME = 'SHIPPED_OTHER'\n"
            + ASYNC
            + "    return float(KEY == 'k-1' and os.getenv(NAME) == 'o-1')\n",
        },
        "flow.py:flow",
        {"SHIPPED_USER_KEY": "k-1", "SHIPPED_OTHER": "o-1"},
    ),
    "a_script": Case(
        {
            "train.py": "import os\nfrom pathlib import Path\nfrom helper import double\n"
            "from user_packages import send\n"
            "HERE = Path(__file__).parent\nTEXT = os.path.dirname(os.path.abspath(__file__))\n"
            "class Scale:\n    by = 0.5\n" + ASYNC + "    from lazy_helper import one\n"
            "    a = float((HERE / 'one.txt').read_text())\n"
            "    b = float(open(os.path.join(TEXT, 'one.txt')).read())\n"
            "    c = float(Path(__file__).with_name('one.txt').read_text())\n"
            "    return double(Scale.by) * one() * a * b * c\n"
            "if __name__ == '__main__':\n    send(flow)\n",
            "helper.py": "def double(x):\n    return 2 * x\n",
            "lazy_helper.py": "def one():\n    return 1.0\n",
            "one.txt": "1.0",
        },
        "train.py",
    ),
    "a_closure": Case(
        {
            "train.py": "from helper import double\nfrom user_packages import send\n"
            "def make(scale, path):\n    offset = [0.0]\n"
            "    async def flow(task, model):\n"
            "        return double(scale) + offset[0] + float(open(path).read())\n"
            "    return flow\n"
            "from pathlib import Path\n"
            "if __name__ == '__main__':\n"
            "    send(make(0.5, str(Path(__file__).parent / 'zero.txt')))\n",
            "helper.py": "def double(x):\n    return 2 * x\n",
            "zero.txt": "0.0",
        },
        "train.py",
    ),
    "a_partial": Case(
        {
            "train.py": "import functools\nfrom pathlib import Path\n"
            "from user_packages import send\nfrom parts.flows import scaled, Options\n"
            "if __name__ == '__main__':\n"
            "    send(functools.partial(scaled, options=Options(0.5),\n"
            "                           path=Path(__file__).parent / 'two.txt'))\n",
            "parts/__init__.py": "",
            "parts/flows.py": "from dataclasses import dataclass\n"
            "@dataclass\nclass Options:\n    scale: float\n"
            "async def scaled(task, model, options, path):\n"
            "    return options.scale * float(path.read_text())\n",
            "two.txt": "2.0",
        },
        "train.py",
    ),
    "an_object": Case(
        {
            "flow.py": "from tools import Tool\nclass Flow:\n"
            "    def __init__(self):\n        self.tool = Tool(1.0)\n"
            "    async def __call__(self, task, model):\n        return self.tool.value\n"
            "flow = Flow()\n",
            "tools.py": "class Tool:\n    def __init__(self, value):\n        self.value = value\n",
        },
        "flow.py:flow",
    ),
    "an_object_with_paths": Case(
        {
            "flow.py": "from dataclasses import dataclass\nfrom pathlib import Path\n"
            "HERE = Path(__file__).parent\n"
            "@dataclass(frozen=True)\nclass Options:\n    path: Path\n"
            "class Slotted:\n    __slots__ = ('path',)\n"
            "class Flow:\n    def __init__(self):\n        self.data = HERE / 'data'\n"
            "        self.options = Options(HERE / 'data' / 'one.txt')\n"
            "        self.slotted = Slotted()\n"
            "        self.slotted.path = str(HERE / 'data' / 'one.txt')\n"
            "        self.table = {'one': [HERE / 'data' / 'one.txt']}\n"
            "    async def __call__(self, task, model):\n"
            "        paths = [self.data / 'one.txt', self.options.path, self.slotted.path]\n"
            "        paths += self.table['one']\n"
            "        return sum(float(open(path).read()) for path in paths) / 4\n"
            "flow = Flow()\n",
            "data/one.txt": "1.0",
        },
        "flow.py:flow",
    ),
    "a_bound_method": Case(
        {
            "flow.py": "from pathlib import Path\nclass Flow:\n"
            "    def __init__(self, path):\n        self.path = path\n"
            "    async def run(self, task, model):\n"
            "        return float(self.path.read_text())\n"
            "flow = Flow(Path(__file__).parent / 'one.txt').run\n",
            "one.txt": "1.0",
        },
        "flow.py:flow",
    ),
    "paths_all_over_the_script": Case(
        {
            "train.py": "import functools\nfrom dataclasses import dataclass\n"
            "from pathlib import Path\nfrom user_packages import send\n"
            "HERE = Path(__file__).parent\nONE = HERE / 'one.txt'\n"
            "FILES = {'text': [str(ONE)], ONE: (ONE, 1)}\n"
            "@dataclass\nclass Options:\n    path: Path = ONE\n"
            "class Store:\n    folder = HERE\n"
            "    @staticmethod\n    def read(name):\n"
            "        return float((Store.folder / name).read_text())\n"
            "def make(held):\n"
            "    async def flow(task, model, *, options, other=ONE):\n"
            "        key = [key for key in FILES if key != 'text'][0]\n"
            "        paths = [FILES['text'][0], key, FILES[key][0], held['deep'][0]]\n"
            "        paths += [options.path, other]\n"
            "        return Store.read('one.txt') * sum(float(open(p).read()) for p in paths) / 6\n"
            "    return flow\n"
            "if __name__ == '__main__':\n"
            "    send(functools.partial(make({'deep': (ONE,)}), options=Options()))\n",
            "one.txt": "1.0",
        },
        "train.py",
    ),
    "an_object_of_the_script": Case(
        {
            "train.py": "from pathlib import Path\nfrom user_packages import send\n"
            "HERE = Path(__file__).parent\nclass Flow:\n    folder = HERE\n"
            "    async def __call__(self, task, model):\n"
            "        texts = [(folder / 'one.txt').read_text() for folder in (HERE, self.folder)]\n"
            "        return float(texts[0]) * float(texts[1])\n"
            "if __name__ == '__main__':\n    send(Flow())\n",
            "one.txt": "1.0",
        },
        "train.py",
    ),
    "installed_in_place": Case(
        {
            "train.py": "import json, sys\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
            "sys.path[:0] = [str(HERE / 'src'), str(HERE / 'site-packages')]\n"
            "told = {'url': (HERE / 'src').as_uri(), 'dir_info': {'editable': True}}\n"
            "record = HERE / 'site-packages' / 'inplace_kit-1.0.dist-info'\n"
            "(record / 'direct_url.json').write_text(json.dumps(told))\n"
            "from inplace_kit.flows import flow\nfrom user_packages import send\n"
            "if __name__ == '__main__':\n    send(flow)\n",
            "src/inplace_kit/__init__.py": "",
            "src/inplace_kit/flows.py": "from importlib.metadata import version\n"
            + ASYNC
            + "    return float(version('inplace-kit'))\n",
            "site-packages/inplace_kit-1.0.dist-info/METADATA": "Metadata-Version: 2.1\n"
            "Name: inplace-kit\nVersion: 1.0\n",
            "site-packages/inplace_kit-1.0.dist-info/RECORD": "".join(
                f"inplace_kit-1.0.dist-info/{name},,\n"
                for name in ("METADATA", "RECORD", "direct_url.json")
            ),
        },
        "train.py",
    ),
    "from_the_current_folder": Case(
        {
            "pkg/__init__.py": "",
            "pkg/flows.py": ASYNC + "    return float(open('settings/one.txt').read())\n",
            "settings/one.txt": "1.0",
        },
        "pkg.flows:flow",
    ),
    "folders_from_the_current_folder": Case(
        {
            "scripts/train.py": "from fromhere.flows import flow\nfrom user_packages import send\n"
            "if __name__ == '__main__':\n    send(flow)\n",
            "scripts/fromhere/__init__.py": "",
            "scripts/fromhere/flows.py": "import glob\nimport os\nfrom pathlib import Path\n"
            "ONE = 'one'\n"
            + ASYNC
            + "    texts = [(Path('a') / f'{name}.txt').read_text() for name in [ONE]]\n"
            "    texts += [open(path).read() for path in glob.glob('b/*.txt')]\n"
            "    texts += [open(os.path.join('c', name)).read() for name in os.listdir('c')]\n"
            "    for name in [ONE]:\n"
            "        texts += [open(f'd/{name}.txt').read(), open('e/%s.txt' % name).read()]\n"
            "        texts += [open(os.path.join('f', 'deep', name + '.txt')).read()]\n"
            "    return sum(float(text) for text in texts) / 6\n",
            **{f"{name}/one.txt": "1.0" for name in ("a", "b", "c", "d", "e", "f/deep")},
        },
        "scripts/train.py",
    ),
    "a_path_with_dots": Case(
        {
            "scripts/train.py": "import os\nfrom user_packages import send\n"
            "HERE = os.path.dirname(os.path.abspath(__file__))\n"
            "def above(name):\n    return HERE + '/../' + name\n"
            "def make(folder):\n"
            "    async def flow(task, model):\n"
            "        return float(open(os.path.join(folder, 'one.txt')).read())\n"
            "    return flow\n"
            "if __name__ == '__main__':\n    send(make(above('data')))\n",
            "data/one.txt": "1.0",
        },
        "scripts/train.py",
    ),
    "a_link_beside_its_folder": Case(
        {
            "train.py": "import os\nfrom linked.flows import flow\n"
            "from user_packages import send\n"
            "if __name__ == '__main__':\n"
            "    os.symlink('v2', 'linked/prompts/current')\n    send(flow)\n",
            "linked/__init__.py": "",
            "linked/flows.py": "from pathlib import Path\n"
            + ASYNC
            + "    folders = [Path(__file__).parent / 'prompts' / n for n in ('current', 'v2')]\n"
            "    return sum(float((folder / 'one.txt').read_text()) for folder in folders) / 2\n",
            "linked/prompts/v2/one.txt": "1.0",
        },
        "train.py",
    ),
    "a_program": Case(
        {
            "train.py": "import os\nfrom starts.flows import flow\n"
            "from user_packages import send\n"
            "if __name__ == '__main__':\n    os.chmod('starts/one.sh', 0o755)\n    send(flow)\n",
            "starts/__init__.py": "",
            "starts/flows.py": "import subprocess\nfrom pathlib import Path\n"
            + ASYNC
            + "    return float(subprocess.check_output([Path(__file__).parent / 'one.sh']))\n",
            "starts/one.sh": "#!/bin/sh\necho 1.0\n",
        },
        "train.py",
    ),
    "a_notebook": Case(
        {
            "cell.txt": "import os\nasync def flow(task, model):\n    from beside import one\n"
            "    assert os.environ['CELL_KEY'] == 'k-1'\n"
            "    return one() * float(open('settings/one.txt').read())\n",
            "train.py": "import linecache, sys\nfrom user_packages import send\n"
            "text, name = open('cell.txt').read(), '/nowhere/ipykernel_1/1.py'\n"
            "linecache.cache[name] = (len(text), None, text.splitlines(True), name)\n"
            "del __file__\nexec(compile(text, name, 'exec'))\nsend(flow)\n",
            "beside.py": "def one():\n    return 1.0\n",
            "settings/one.txt": "1.0",
        },
        "train.py",
        {"CELL_KEY": "k-1"},
    ),
}

COMPILED = Case(
    {
        "native/__init__.py": "",
        "native/flows.py": ASYNC + "    from native import _speed\n    return _speed.one()\n",
    },
    "native.flows:flow",
)
"""With a compiled module, which a test puts there."""

DRIVER = """
import sys
from pathlib import Path
from aflow_tune.contract.plugins import resolve
from user_packages import send
send(resolve(sys.argv[1], Path.cwd()))
"""
LOAD = """
import asyncio, os, pickle, sys
from pathlib import Path
from aflow_tune.shipping.arrival import arrive, settle
arrive()
source = os.environ["HIDDEN"]
try:
    os.listdir(source)
except FileNotFoundError:
    pass
else:
    raise SystemExit("the worker sees the driver's folder")
flow = settle(pickle.loads(Path(sys.argv[1]).read_bytes()))
print(asyncio.run(flow({}, None)))
"""


def send(*functions: Any) -> None:
    """As a driver: write bundle and pickle into the folder that `SENT_TO` names."""
    import os

    import cloudpickle

    from aflow_tune.shipping.bundle import write_bundle
    from aflow_tune.shipping.tracing import trace

    out = Path(os.environ["SENT_TO"])
    found = trace(functions)
    told = {
        "faults": [str(fault) for fault in found.faults],
        "needs": found.needs,
        "variables": found.variables,
        "warnings": found.warnings,
        "files": [str(path) for path in found.files],
    }
    (out / "found.json").write_text(json.dumps(told))
    bundle = write_bundle(found, out)
    (out / "name").write_text(bundle.name)
    (out / "function").write_bytes(cloudpickle.dumps(functions[0]))


def run_driver(case: Case, source: Path, out: Path, environment: dict[str, str]) -> Any:
    """Run the driver of a case in its folder; what tracing found."""
    command = [case.spec] if case.is_script else ["-c", DRIVER, case.spec]
    subprocess.run(
        [sys.executable, *command],
        cwd=source,
        env={**environment, **case.environment, "SENT_TO": str(out)},
        check=True,
    )
    return json.loads((out / "found.json").read_text())
