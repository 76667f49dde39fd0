"""Good, broken, hostile, endless and over-budget graphs, for the tests of the writer's check."""

from __future__ import annotations

from graph_samples import GATHER, QA
from written_samples import PLAIN, workflow

from aflow_tune.writer.types import RefusalKind

K = RefusalKind
SOLVED = "r = await self.solve(input=problem)\n"
DONE = 'return r["response"]'

GOOD = {
    "plain": PLAIN,
    "AFlow, QA": QA,
    "asyncio, a counter, a helper": GATHER,
    "operators in a list and a dict": workflow(
        "out = []\n"
        "for name, op in self.steps.items():\n"
        "    got = await op(input=problem)\n"
        "    out.append(f\"{name}: {got['response']}\")\n"
        'last = await self.steps["check"](input="\\n".join(out))\n'
        'return last["response"]',
        init=(
            "make = operator.Custom\n"
            'self.steps = {"draft": make(self.llm), "check": operator.Custom(self.llm)}'
        ),
    ),
    "static helper": workflow(
        SOLVED + 'return self._short(r["response"])',
        rest="@staticmethod\ndef _short(text):\n    return text.strip()[:100]",
    ),
    "a semaphore": workflow(
        "import asyncio\ngate = asyncio.Semaphore(2)\n"
        "async def one(text):\n    async with gate:\n        return await self.solve(text)\n"
        'rs = await asyncio.gather(*[one(t) for t in ("a", "b")], return_exceptions=True)\n'
        "return str(rs[0])"
    ),
    "a result that is changed": workflow(
        SOLVED + 'r["response"] = r["response"].strip()\nr["note"] = "x"\nreturn r["note"]'
    ),
    "getattr with a name": workflow(
        'op = getattr(self, "solve")\nr = await op(input=problem)\n' + DONE
    ),
    "a value of the turn before": workflow(
        "for turn in range(2):\n"
        "    text = problem if turn == 0 else better\n"
        "    r = await self.solve(input=text)\n"
        '    better = r["response"]\n'
        "steps = [lambda: part for part in better.split()]\n"
        "return steps[0]() if steps else better"
    ),
    "answers under a key": workflow(
        f"state = {{}}\nfor _ in range(3):\n    {SOLVED}"
        '    state.setdefault("all", []).append(r["response"])\nreturn state["all"][0], 0.0'
    ),
    "a list by another name": workflow(
        f'kept = self.kept\n{SOLVED}kept.append(r["response"])\nreturn self.kept[-1], 0.0',
        init="self.kept = []",
    ),
    "a helper that nobody calls": workflow(
        SOLVED + DONE, rest="async def later(self, tasks):\n    return [await t for t in tasks]"
    ),
}


ASKING = "r = await self.solve(problem, instruction=%s)\n" + DONE
LOGGING = "import logging\nlogger = logging.getLogger(__name__)\n"
GOOD |= {
    "a logger": workflow(
        "logger.info('%s', problem)\nlogging.debug(type(problem).__name__)\n" + SOLVED + DONE,
        head=LOGGING + "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "logger.addHandler(logging.StreamHandler())\nlogger.propagate = False\n",
    ),
    "a logger keeps nothing": workflow(
        "drafts = []\n"
        "for _ in range(2):\n"
        f"    {SOLVED}"
        '    drafts.append(r["response"])\n'
        "    self.log.warning('so far %s', drafts)\n"
        "for draft in drafts:\n    r = await self.solve(input=draft)\n" + DONE,
        head="from logging import getLogger\n",
        init="self.log = getLogger(self.__class__.__name__)",
    ),
    "run as a program": PLAIN
    + '\n\nasync def main():\n    print(await Workflow("x", {}, "GSM8K")("1 + 1"))\n'
    + '\n\nif __name__ == "__main__":\n    import sys\n    asyncio.run(main(sys.argv))\n',
    "prompts of its own": workflow(
        ASKING % 'self.prompts["solve"]', init='self.prompts = {"solve": "Be exact."}'
    ),
    "prompts of its own, one by one": workflow(
        ASKING % 'self.prompts["solve"]', init='self.prompts["solve"] = "Be exact."'
    ),
    "prompts of the class": workflow(
        ASKING % 'self.prompts["solve"]', rest='prompts = dict(solve="Be exact.")'
    ),
    "a prompt missing where a flag is off": workflow(
        SOLVED + "if self.deep:\n    r = await self.again(problem)\n" + DONE,
        init="self.deep = False",
        rest="async def again(self, text):\n    return await self.solve(text, prompt_custom.DEEP)",
    ),
    "a prompt missing in the other half": workflow(
        ASKING % '(self.prompts["long"] if len(problem) > 9999 else "Be brief.")'
    ),
    "a prompt missing behind an early answer": workflow(
        f"{SOLVED}if r['response']:\n    {DONE}\n" + ASKING % "prompt_custom.AGAIN"
    ),
    "a prompt missing where that is caught": workflow(
        'try:\n    text = prompt_custom.LONG\nexcept AttributeError:\n    text = "Be brief."\n'
        + ASKING % "text"
    ),
}

L = 9
"""The first line of __call__'s body in a graph without head and init."""

BAD: dict[str, tuple[str, list[tuple[RefusalKind, int]]]] = {
    "syntax": ("class Workflow:\n    def (:\n        pass\n", [(K.SYNTAX, 2)]),
    "await outside of async": (
        PLAIN + "\n    def f(self):\n        return await self.solve('x')\n",
        [(K.SYNTAX, 13)],
    ),
    "no class": ("x = 1\n", [(K.SHAPE, 0)]),
    "another class": (
        PLAIN.replace("class Workflow", "class Flow"),
        [(K.NOT_ALLOWED, 1), (K.SHAPE, 0)],
    ),
    "no __call__": (
        "class Workflow:\n    def __init__(self, name, llm_config, dataset):\n        pass\n",
        [(K.SHAPE, 1)],
    ),
    "a plain __call__": (
        PLAIN.replace("async def __call__", "def __call__").replace("await ", ""),
        [(K.SHAPE, 8), (K.ARGUMENTS, 9)],
    ),
    "wrong __init__": (PLAIN.replace("name, llm_config, dataset", "llm_config"), [(K.SHAPE, 2)]),
    "returns nothing": (workflow(SOLVED + 'x = r["response"]'), [(K.SHAPE, 8)]),
    "three values": (workflow(SOLVED + 'return r["response"], 0, 1'), [(K.SHAPE, L + 1)]),
    "no operator": (workflow('return "42", 0.0'), [(K.SHAPE, 8)]),
    "os": (workflow("import os\n" + SOLVED + DONE), [(K.NOT_ALLOWED, L)]),
    "subprocess": (
        workflow(SOLVED + DONE, head="from subprocess import run\n"),
        [(K.NOT_ALLOWED, 1)],
    ),
    "not there": (workflow(SOLVED + DONE, head="import numpy as np\n"), [(K.NOT_ALLOWED, 1)]),
    "operator imported": (workflow(SOLVED + DONE, head="import operator\n"), [(K.NOT_ALLOWED, 1)]),
    "eval": (workflow(SOLVED + 'return eval(r["response"])'), [(K.NOT_ALLOWED, L + 1)]),
    "open": (workflow(SOLVED + 'open("x").read()\n' + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "__import__": (workflow(SOLVED + '__import__("os")\n' + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "dunder": (workflow(SOLVED + "x = r.__class__.__mro__\n" + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "frames": (workflow(SOLVED + "x = self.__call__.cr_frame\n" + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "private": (workflow(SOLVED + "x = self.solve._session\n" + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "getattr": (workflow(SOLVED + "getattr(r, problem)\n" + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "setattr": (workflow(SOLVED + "setattr(self, problem, 1)\n" + DONE), [(K.NOT_ALLOWED, L + 1)]),
    "global": (workflow("global X\nX = 1\n" + SOLVED + DONE), [(K.NOT_ALLOWED, L)]),
    "yield": (workflow(SOLVED + "yield 1"), [(K.SHAPE, 8), (K.NOT_ALLOWED, L + 1)]),
    "a generator": (
        workflow(SOLVED + DONE, rest="def many(self):\n    yield 1"),
        [(K.NOT_ALLOWED, L + 3)],
    ),
    "with": (
        workflow('with open("x") as f:\n    pass\n' + SOLVED + DONE),
        [(K.NOT_ALLOWED, L)] * 2,
    ),
    "async for": (
        workflow("async for x in problem:\n    pass\n" + SOLVED + DONE),
        [(K.NOT_ALLOWED, L)],
    ),
    "metaclass": (PLAIN.replace("Workflow:", "Workflow(metaclass=type):"), [(K.NOT_ALLOWED, 1)]),
    "base": (PLAIN.replace("Workflow:", "Workflow(dict):"), [(K.NOT_ALLOWED, 1)]),
    "decorator": (
        workflow(SOLVED + DONE, rest="@property\ndef x(self):\n    return 1"),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "own dunder": (
        workflow(SOLVED + DONE, rest="def __getattr__(self, name):\n    return 1"),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "operator's own code": (
        workflow("operator.Custom.run = 1\n" + SOLVED + DONE),
        [(K.NOT_ALLOWED, L)],
    ),
    "type makes a class": (
        workflow(SOLVED + 'T = type("T", (), {})\n' + DONE),
        [(K.NOT_ALLOWED, L + 1)],
    ),
    "a module of logging's own": (
        workflow("logging.os.system('id')\n" + SOLVED + DONE, head="import logging\n"),
        [(K.NOT_ALLOWED, L + 1)],
    ),
    "a module of logging's own, asked for": (
        workflow("x = getattr(logging, 'sys', None)\n" + SOLVED + DONE, head="import logging\n"),
        [(K.NOT_ALLOWED, L + 1)],
    ),
    "a log in a file": (
        workflow(
            SOLVED + DONE,
            head="import logging\nlogging.basicConfig(filename='/tmp/x')\n"
            "from logging import FileHandler\n",
        ),
        [(K.NOT_ALLOWED, 2), (K.NOT_ALLOWED, 3)],
    ),
    "behind a logger": (
        workflow("logger.manager.disable = 1\n" + SOLVED + DONE, head=LOGGING),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "a default of what only the program calls": (
        PLAIN + "\ndef main(text=open('x')):\n    pass\nif __name__ == '__main__':\n    main()\n",
        [(K.NOT_ALLOWED, 12)],
    ),
    "the module's name": ("__name__ = '__main__'\n" + PLAIN, [(K.NOT_ALLOWED, 1)]),
    "beside the program": (
        PLAIN + "if __name__ == '__main__':\n    pass\nelse:\n    open('x')\n",
        [(K.NOT_ALLOWED, 14)],
    ),
    "a prompt missing on every path": (
        workflow(
            "r = await self.first(problem)\n" + DONE,
            rest="async def first(self, text):\n    return await self.solve(text, prompt_custom.A)",
        ),
        [(K.PROMPT, L + 3)],
    ),
    "statements outside": (PLAIN + "\nprint('x')\n", [(K.NOT_ALLOWED, 12)]),
    "unknown call": (
        workflow("import json\njson.loads('1')(problem)\n" + SOLVED + DONE),
        [(K.NOT_ALLOWED, L + 1)],
    ),
    "unknown operator": (
        workflow(SOLVED + DONE, init="self.fix = operator.Revize(self.llm)"),
        [(K.UNKNOWN_OPERATOR, 7)],
    ),
    "operator of a package": (
        workflow(SOLVED + DONE, head="from workflows.template.operator import Costum\n"),
        [(K.UNKNOWN_OPERATOR, 1)],
    ),
    "unknown name": (workflow("r = await self.solve(probelm)\n" + DONE), [(K.UNKNOWN_NAME, L)]),
    "no value yet": (
        workflow("x = text\n" + SOLVED + "text = 'x'\n" + DONE),
        [(K.UNKNOWN_NAME, L)],
    ),
    "the model by another name": (
        workflow("r = await self.llm(input=problem)\nreturn r"),
        [(K.ARGUMENTS, L)],
    ),
    "unknown attribute": (
        workflow("r = await self.revise(problem)\n" + DONE),
        [(K.UNKNOWN_NAME, L)],
    ),
    "unknown key": (workflow(SOLVED + 'return r["respones"]'), [(K.UNKNOWN_NAME, L + 1)]),
    "key as attribute": (workflow(SOLVED + "return r.response"), [(K.UNKNOWN_NAME, L + 1)]),
    "operator of an operator": (
        workflow("r = await self.solve.solve(problem)\n" + DONE),
        [(K.UNKNOWN_NAME, L)],
    ),
    "typing not imported": (
        workflow(SOLVED + DONE, rest="def f(self) -> Tuple[int]:\n    return 1"),
        [(K.UNKNOWN_NAME, L + 2)],
    ),
    "class constant without self": (
        workflow("r = await self.solve(SHORT)\n" + DONE, rest='SHORT = "x"'),
        [(K.UNKNOWN_NAME, L)],
    ),
    "wrong keyword": (
        workflow("r = await self.solve(prompt=problem)\n" + DONE),
        [(K.ARGUMENTS, L)],
    ),
    "missing argument": (
        workflow('r = await self.review(problem)\nreturn r["feedback"]'),
        [(K.ARGUMENTS, L)],
    ),
    "too many": (
        workflow('r = await self.solve(problem, "a", "b", "c")\n' + DONE),
        [(K.ARGUMENTS, L)],
    ),
    "unseen arguments": (workflow("r = await self.solve(*problem)\n" + DONE), [(K.ARGUMENTS, L)]),
    "no model": (workflow(SOLVED + DONE, init="self.x = operator.Custom()"), [(K.ARGUMENTS, 7)]),
    "a text for the model": (
        workflow(SOLVED + DONE, init='self.x = operator.Custom("gpt")'),
        [(K.ARGUMENTS, 7)],
    ),
    "another model": (
        workflow(SOLVED + DONE, init='self.other = create_llm_instance("gpt-4o")'),
        [(K.ARGUMENTS, 7)],
    ),
    "wrong option": (
        workflow(SOLVED + DONE, init="self.x = operator.MdEnsemble(self.llm, votes=3)"),
        [(K.ARGUMENTS, 7)],
    ),
    "option out of bounds": (
        workflow(SOLVED + DONE, init="self.x = operator.Programmer(self.llm, programs=99)"),
        [(K.ARGUMENTS, 7)],
    ),
    "prompts as an option": (
        workflow(SOLVED + DONE, init='self.x = operator.Custom(self.llm, prompts="x")'),
        [(K.ARGUMENTS, 7)],
    ),
    "a whole result as the answer": (
        workflow("r = await self.solve(problem)\nreturn r, 0.0"),
        [(K.SHAPE, L + 1)],
    ),
    "a whole result without its cost": (
        workflow("return await self.solve(problem)"),
        [(K.SHAPE, L)],
    ),
    "a dict as the answer": (
        workflow('r = await self.solve(problem)\nreturn {"answer": r["response"]}, 0.0'),
        [(K.SHAPE, L + 1)],
    ),
    "a text for a list": (
        workflow(
            "a = await self.solve(problem)\n"
            'b = await self.pick(a["response"])\nreturn b["response"]'
        ),
        [(K.ARGUMENTS, L + 1)],
    ),
    "not awaited": (workflow("r = self.solve(problem)\n" + DONE), [(K.ARGUMENTS, L)]),
    "not awaited, not kept": (
        workflow("self.solve(problem)\n" + SOLVED + DONE),
        [(K.ARGUMENTS, L)],
    ),
    "not awaited, returned": (workflow("return self.solve(problem), 0.0"), [(K.ARGUMENTS, L)]),
    "not awaited in a text": (
        workflow('x = f"{self.solve(problem)}"\n' + SOLVED + DONE),
        [(K.ARGUMENTS, L)],
    ),
    "not awaited helper": (
        workflow(
            "x = self.f(problem)\nreturn x.strip()",
            rest='async def f(self, p):\n    r = await self.solve(p)\n    return r["response"]',
        ),
        [(K.ARGUMENTS, L)],
    ),
    "awaited for nothing": (
        workflow(
            "x = await self.f(problem)\n" + SOLVED + DONE,
            rest="def f(self, p):\n    return p.strip()",
        ),
        [(K.ARGUMENTS, L)],
    ),
    "awaited, not called": (workflow("r = await self.solve\n" + SOLVED + DONE), [(K.ARGUMENTS, L)]),
    "gather of a list": (
        workflow(
            "import asyncio\nt = [self.solve(problem)]\nr = await asyncio.gather(t)\nreturn str(r)"
        ),
        [(K.ARGUMENTS, L + 2)],
    ),
    "a generator that waits": (
        workflow('return " ".join((await self.solve(problem))["response"] for _ in range(2))'),
        [(K.NOT_ALLOWED, L)],
    ),
    "three values for two names": (
        workflow('a, b = [await self.solve("x"), await self.solve("y"), 1]\n' + SOLVED + DONE),
        [(K.ARGUMENTS, L)],
    ),
    "an endless while without calls": (
        workflow(SOLVED + "while problem:\n    pass\n" + DONE),
        [(K.UNBOUNDED, L + 1)],
    ),
    "an answer that is written out": (workflow(SOLVED + 'return "42", 0.0'), [(K.SHAPE, 8)]),
    "a module of a module": (
        workflow("import typing\n" + SOLVED + "x = typing.sys.modules\n" + DONE),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "a module from a module": (
        workflow(SOLVED + DONE, head="from typing import sys\n"),
        [(K.NOT_ALLOWED, 1)],
    ),
    "annotations that are evaluated": (
        workflow("import typing\n" + SOLVED + "typing.get_type_hints(problem)\n" + DONE),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "getattr handed over": (
        workflow(
            "from functools import reduce\n"
            + SOLVED
            + 'x = reduce(getattr, ["__class__", "__mro__"], r)\n'
            + DONE
        ),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "getattr of a frame": (
        workflow(SOLVED + 'getattr(problem, "f_globals")\n' + DONE),
        [(K.NOT_ALLOWED, L + 1)],
    ),
    "a class in a pattern": (
        workflow(SOLVED + "match r:\n    case object(__class__=kind):\n        pass\n" + DONE),
        [(K.NOT_ALLOWED, L + 2)],
    ),
    "recursion": (
        workflow(
            "return await self.f(problem)",
            rest="async def f(self, p):\n"
            '    r = await self.solve(p)\n    return await self.f(r["response"])',
        ),
        [(K.UNBOUNDED, L + 3)],
    ),
    "mutual recursion": (
        workflow(
            "return await self.f(problem)",
            rest="async def f(self, p):\n    return await self.g(p)\n"
            "async def g(self, p):\n    return await self.f(p)",
        ),
        [(K.UNBOUNDED, L + 4)],
    ),
    "itself": (workflow("return await self(problem)"), [(K.NOT_ALLOWED, L)]),
    "over budget": (
        workflow(f"for _ in range(201):\n    {SOLVED}" + DONE),
        [(K.OVER_BUDGET, L + 1)],
    ),
    "far over budget": (
        workflow(f"for _ in range(10**15):\n    {SOLVED}" + DONE),
        [(K.OVER_BUDGET, L + 1)],
    ),
    "too long": (workflow(SOLVED + DONE) + "\n" + "# x\n" * 10_001, [(K.TOO_LARGE, 0)]),
    "too deep": ("x = " + "(" * 200 + "1" + ")" * 200, [(K.TOO_LARGE, 0)]),
    "deeper than the parser goes": ("x = " + "-" * 30_000 + "1", [(K.TOO_LARGE, 0)]),
    "too many ways": (
        workflow(
            "return await self.f0(problem)",
            rest="\n".join(
                f"async def f{i}(self, p):\n"
                f"    await self.f{i + 1}(p)\n    return await self.f{i + 1}(p)"
                for i in range(10)
            )
            + "\nasync def f10(self, p):\n    for a in range(30):\n"
            "        x = [a, p]\n        x.append(x)\n    return p",
        ),
        [(K.SHAPE, 8)],
    ),
}

ENDLESS = {
    "while true": workflow(
        f"while True:\n    {SOLVED}    if r['response']:\n        break\n" + DONE
    ),
    "a counter that may stand still": workflow(
        f"i = 0\nwhile i < 3:\n    {SOLVED}    if not r['response']:\n"
        f"        continue\n    i += 1\n" + DONE
    ),
    "a counter that is reset": workflow(
        f"i = 0\nwhile i < 3:\n    {SOLVED}    i += 1\n"
        f"    match 0:\n        case i:\n            pass\n" + DONE
    ),
    "a list that is emptied out of sight": workflow(
        "drafts = []\ndef wipe():\n    drafts.clear()\nwhile len(drafts) < 3:\n"
        f"    {SOLVED}    drafts.append(r)\n    wipe()\n" + DONE
    ),
    "a list that its method empties": workflow(
        "drafts = []\nwipe = drafts.clear\nwhile len(drafts) < 3:\n"
        f"    {SOLVED}    drafts.append(r)\n    wipe()\n" + DONE
    ),
    "a list that the workflow holds": workflow(
        "drafts = self.drafts\nwhile len(drafts) < 3:\n"
        f"    {SOLVED}    drafts.append(r)\n    self.wipe()\n" + DONE,
        init="self.drafts = []",
        rest="def wipe(self):\n    self.drafts.clear()",
    ),
    "a list that grows by another name": workflow(
        "xs, i = [1], 0\nys = xs\nwhile i < len(xs):\n"
        f"    {SOLVED}    i += 1\n    ys.append(i)\n" + DONE
    ),
    "a limit that runs away": workflow(
        f"i, n = 0, 3\nwhile i < n:\n    {SOLVED}    i += 1\n    n += 1\n" + DONE
    ),
    "lines of the problem": workflow(f'for line in problem.split("\\n"):\n    {SOLVED}' + DONE),
    "lines in a comprehension": workflow(
        "rs = [await self.solve(line) for line in problem.splitlines()]\nreturn str(rs)"
    ),
    "lines in a map": workflow(
        "import asyncio\n"
        "rs = await asyncio.gather(*map(self.solve, problem.split()))\nreturn str(rs)"
    ),
    "a list that grows under its loop": workflow(
        f"xs = [1]\nys = xs\nfor x in xs:\n    {SOLVED}    ys.append(x)\n" + DONE
    ),
}
"""Graphs without a bound that can be told: the check lets them pass, the meter stops them."""
