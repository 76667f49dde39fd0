"""A project as users write them, with every kind of code that has to reach a worker.

`train.py` gathers one function of each kind, those that `SPECS` names and some of its own
(`__main__`), and gives them to a driver: `send` here, or that of the test cluster
(`cluster_driver.py`). Each returns 1.0 only if everything it reaches for is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = {"SHIPPED_USER_KEY": "k-1", "SHIPPED_OTHER": "o-1"}
"""What the user's shell has, and a worker only if it is handed over."""
ASYNC = "async def flow(task, model):\n"
FILES = {
    # A file with siblings, and with data beside it.
    "beside.py": "from pathlib import Path\nfrom sibling import double\n"
    "HERE = Path(__file__).parent\n"
    + ASYNC
    + "    return double(0.5) * float((HERE / 'data' / 'one.txt').read_text())\n",
    "sibling.py": "from deeper import two\ndef double(x):\n    return two() * x\n",
    "deeper.py": "def two():\n    return 2\n",
    "data/one.txt": "1.0",
    # A package: relative imports, siblings that are imported late, what `__init__` does, data.
    "kit/__init__.py": "KNOWN = {}\nfrom . import plugins\nfrom .core import flow\n",
    "kit/plugins.py": "from kit import KNOWN\n"
    "def add(f):\n    KNOWN[f.__name__] = f\n    return f\n"
    "@add\ndef one():\n    return 1.0\n",
    "kit/core.py": "from . import tools\nfrom .inner.deep import one\nfrom kit import KNOWN\n"
    + ASYNC
    + "    import importlib\n    name = 'fl' + 'oat'\n"
    "    late = importlib.import_module(f'kit.by_{name}')\n"
    "    return tools.same(one()) * KNOWN['one']() * late.VALUE\n",
    "kit/tools.py": "def same(x):\n    from .lazy import identity\n    return identity(x)\n",
    "kit/lazy.py": "def identity(x):\n    return x\n",
    "kit/inner/__init__.py": "",
    "kit/inner/deep.py": "from ..constants import ONE\ndef one():\n    return ONE\n",
    "kit/constants.py": "ONE = 1.0\n",
    "kit/by_float.py": "VALUE = 1.0\n",
    "kit/stock.py": "import importlib.resources as r\nimport json\nimport pkgutil\n"
    "import subprocess\nfrom pathlib import Path\n"
    + ASYNC
    + "    a = json.loads(r.files('kit').joinpath('data/a.json').read_text())\n"
    "    b = json.loads((Path(__file__).parent / 'data' / 'a.json').read_text())\n"
    "    c = json.loads(pkgutil.get_data('kit', 'data/a.json'))\n"
    "    d = float(subprocess.check_output([Path(__file__).parent / 'one.sh']))\n"
    "    return (a + b + c + d) / 4\n",
    "kit/data/a.json": "1.0",
    "kit/one.sh": "#!/bin/sh\necho 1.0\n",
    # A package without `__init__`, and a layout with data above the package.
    "spaced/left/flows.py": "from spaced.right.values import one\n" + ASYNC + "    return one()\n",
    "spaced/right/values.py": "def one():\n    return 1.0\n",
    "src/above/__init__.py": "",
    "src/above/flows.py": "from pathlib import Path\nROOT = Path(__file__).resolve().parents[2]\n"
    + ASYNC
    + "    here = float(open('settings/one.txt').read())\n"
    "    return here * float((ROOT / 'settings' / 'one.txt').read_text())\n",
    "settings/one.txt": "1.0",
    # A name that the node has too, and what is read from the environment.
    "taken.py": "import json_repair_helper as h\n" + ASYNC + "    return h.VALUE\n",
    "json_repair_helper.py": "VALUE = 1.0\n",
    "reading.py": "import os\nKEY = os.environ['SHIPPED_USER_KEY']\nNAME = 'SHIPPED_OTHER'\n"
    + ASYNC
    + "    return float(KEY == 'k-1' and os.getenv(NAME) == 'o-1')\n",
    # Objects: of the user's classes, with a path among what they hold; and a method of one.
    "shapes/__init__.py": "from .kinds import Point\n",
    "shapes/kinds.py": "from dataclasses import dataclass\nimport enum\nfrom pathlib import Path\n"
    "class Kind(enum.Enum):\n    A = 1\n"
    "@dataclass(frozen=True)\nclass Point:\n    x: float\n    path: Path\n    kind: Kind = Kind.A\n"
    "    async def flow(self, task, model):\n"
    "        import pickle\n"
    "        back = pickle.loads(pickle.dumps(self))\n"
    "        assert back == self and back.kind is Kind.A\n"
    "        return self.x * float(self.path.read_text())\n"
    "    async def __call__(self, task, model):\n"
    "        return await self.flow(task, model)\n",
    "objects.py": "from pathlib import Path\nfrom shapes import Point\n"
    "point = Point(1.0, Path(__file__).parent / 'data' / 'one.txt')\nmethod = point.flow\n",
    "late_helper.py": "def one():\n    return 1.0\n",
    "train.py": """
import asyncio, functools, os, sys
from pathlib import Path
from aflow_tune.contract.plugins import resolve
from sibling import double
from shapes import Point

HERE = Path(__file__).parent
FILES = {"text": [HERE / "data" / "one.txt"]}

class Scale:
    by = 0.5
    folder = HERE

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

async def of_the_script(task, model):
    from late_helper import one
    texts = [FILES["text"][0].read_text(), (Scale.folder / "data" / "one.txt").read_text()]
    assert fibonacci(20) == 6765
    return double(Scale.by) * one() * float(texts[0]) * float(texts[1])

def make(scale, path):
    async def flow(task, model):
        return double(scale) * float(path.read_text())
    return flow

async def scaled(task, model, point, path):
    return point.x * float(path.read_text())

if __name__ == "__main__":
    one = HERE / "data" / "one.txt"
    from user_packages import SPECS
    functions = {name: resolve(spec, HERE) for name, spec in SPECS.items()}
    functions["script"] = of_the_script
    functions["closure"] = make(0.5, one)
    functions["partial"] = functools.partial(scaled, point=Point(1.0, one), path=one)
    __import__(sys.argv[1]).send(functions)
""",
    "cell.txt": "import os\nasync def flow(task, model):\n    from late_helper import one\n"
    "    assert os.environ['SHIPPED_OTHER'] == 'o-1'\n"
    "    return one() * float(open('settings/one.txt').read())\n",
    "notebook.py": "import linecache, sys\n"
    "text, name = open('cell.txt').read(), '/nowhere/ipykernel_1/1.py'\n"
    "linecache.cache[name] = (len(text), None, text.splitlines(True), name)\n"
    "del __file__\nexec(compile(text, name, 'exec'))\n"
    "__import__(sys.argv[1]).send({'notebook': flow})\n",
}
SPECS = {
    "file": "beside.py:flow",
    "package": "kit/core.py:flow",
    "package data": "kit.stock:flow",
    "namespace package": "spaced.left.flows:flow",
    "data above the package": "src/above/flows.py:flow",
    "name of the node's": "taken.py:flow",
    "environment": "reading.py:flow",
    "object": "objects.py:point",
    "bound method": "objects.py:method",
}
LOAD = """
import asyncio, json, os, pickle, sys
from pathlib import Path
from aflow_tune.shipping import arrive
arrive()
assert not os.path.exists(os.environ["HIDDEN"]), "the worker sees the driver's folder"
functions = pickle.loads(Path(sys.argv[1]).read_bytes())
print(json.dumps({name: asyncio.run(flow({}, None)) for name, flow in functions.items()}))
"""


def write_files(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return folder


def send(functions: Mapping[str, Any]) -> None:
    """As a driver without Ray: write bundle and pickle into the folder that `SENT_TO` names."""
    from aflow_tune.cluster.ray_for_run import code_of
    from aflow_tune.cluster.sent_function import dumps
    from aflow_tune.config.load import load_config
    from aflow_tune.shipping import write_bundle

    out = Path(os.environ["SENT_TO"])
    found, _ = code_of(load_config(None), functions.values())
    told = {
        "needs": found.needs,
        "variables": sorted(found.variables & ENVIRONMENT.keys()),
        "warnings": found.warnings,
        "files": [str(path) for path in found.files],
        "bundle": write_bundle(found, out).name,
    }
    (out / "found.json").write_text(json.dumps(told))
    (out / "functions").write_bytes(dumps(functions))


def run_driver(script: str, source: Path, out: Path, environment: Mapping[str, str]) -> Any:
    """Run a script of the project, or the resolver on `file.py:function`; what was gathered."""
    out.mkdir(exist_ok=True)
    command = [script]
    if ":" in script:
        resolving = (
            "import sys, user_packages\nfrom pathlib import Path\n"
            "from aflow_tune.contract.plugins import resolve\n"
            "user_packages.send({'flow': resolve(sys.argv[1], Path.cwd())})\n"
        )
        command = ["-c", resolving, script]
    subprocess.run(
        [sys.executable, *command, "user_packages"],
        cwd=source,
        env={**environment, **ENVIRONMENT, "SENT_TO": str(out)},
        check=True,
    )
    return json.loads((out / "found.json").read_text())
