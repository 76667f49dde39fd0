"""A seeded generator of varied, valid graphs in the style that AFlow's users write.

Each has a few steps over texts and lists of texts: drafts, ensembles, reviews, programs, branches,
bounded loops, helper methods, asyncio.gather. `FAULTS` are replacements that put a mistake of the
kinds that models make into a graph's code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from aflow_tune.writer.form import as_text

HEADS = (
    "",
    "from typing import List, Literal\n\n",
    "from typing import Literal\n"
    "import workspace.GSM8K.workflows.template.operator as operator\n"
    "import workspace.GSM8K.workflows.round_{round}.prompt as prompt_custom\n"
    "from scripts.async_llm import create_llm_instance\n"
    "from scripts.evaluator import DatasetType\n\n",
)
FAULTS: tuple[tuple[str, str, str], ...] = (
    ("unknown_operator", "operator.Custom(self.llm)", "operator.Costum(self.llm)"),
    ("arguments", "= await self.solve(", "= self.solve("),
    ("unknown_name", 'response"]', 'respones"]'),
    ("not_allowed", "async def __call__(", "import os\n    async def __call__("),
    ("unknown_name", "problem)", "question)"),
    ("syntax", "async def __call__(", "async def __call__(("),
    ("shape", "class Workflow", "class Flow"),
)
"""(kind of refusal, text, its replacement)."""


class Generator:
    """Generates one graph after the other from one seed."""

    def __init__(self, seed: int, *, programs: bool = True) -> None:
        self.random = random.Random(seed)
        self.programs = programs
        """Whether graphs may use operators that run programs."""

    def graph(self, steps: int | None = None) -> tuple[dict[str, str], str]:
        """The prompts and the code of a graph."""
        return _One(self.random, self.programs).written(steps or self.random.randint(1, 5))

    def text(self) -> str:
        """A graph in the hybrid form."""
        return as_text(*self.graph())


class _One:
    def __init__(self, chance: random.Random, programs: bool) -> None:
        self.random = chance
        self.programs = programs
        self.operators: dict[str, str] = {"solve": "Custom"}
        self.prompts: dict[str, str] = {}
        self.lines: list[str] = []
        self.texts = ["problem"]
        self.lists: list[str] = []
        self.helpers: list[str] = []
        self.count = 0
        self.indent = 2

    def written(self, steps: int) -> tuple[dict[str, str], str]:
        self.draft()
        for _ in range(steps):
            self.random.choice(self.ways())()
        self.line(f"return {self.texts[-1]}, self.llm.get_usage_summary()['total_cost']")
        head = self.random.choice(HEADS).format(round=self.random.randint(1, 20))
        built = "".join(
            f"        self.{name} = operator.{kind}(self.llm{self.options(kind)})\n"
            for name, kind in self.operators.items()
        )
        code = (
            f"{head}class Workflow:\n"
            "    def __init__(self, name: str, llm_config, dataset) -> None:\n"
            "        self.name = name\n"
            "        self.llm = create_llm_instance(llm_config)\n"
            f"{built}\n"
            "    async def __call__(self, problem: str):\n"
            f"{''.join(self.lines)}"
            f"{''.join(self.helpers)}"
        )
        for name, kind in self.operators.items():
            if kind == "Custom" or self.random.random() < 0.3:
                self.prompts[name] = f"Step {len(self.prompts) + 1}: be exact. "
        return self.prompts, code

    def options(self, kind: str) -> str:
        if kind == "MdEnsemble":
            return f", vote_count={self.random.randint(1, 4)}"
        return f", programs={self.random.randint(1, 3)}" if kind == "Programmer" else ""

    def ways(self) -> Sequence[Callable[[], None]]:
        ways = [self.draft, self.many, self.gather, self.review, self.branch, self.counted]
        ways += [self.helper, self.attempt, self.join]
        if self.lists:
            ways += [self.ensemble, self.each]
        return [*ways, self.program] if self.programs else ways

    def line(self, text: str) -> None:
        self.lines.append(f"{'    ' * self.indent}{text}\n")

    def new(self, word: str) -> str:
        self.count += 1
        return f"{word}_{self.count}"

    def operator(self, kind: str) -> str:
        known = [name for name, other in self.operators.items() if other == kind]
        if known and self.random.random() < 0.6:
            return self.random.choice(known)
        name = kind.lower() if not known else f"{kind.lower()}_{len(known) + 1}"
        self.operators[name] = kind
        return name

    def text(self) -> str:
        some = self.random.choice(self.texts)
        shapes = (
            some,
            f'f"Problem: {{problem}}\\nSo far: {{{some}}}"',
            f'problem + "\\n" + {some}',
        )
        return self.random.choice(shapes)

    def draft(self) -> None:
        result, text = self.new("draft"), self.new("text")
        if self.random.random() < 0.25:
            self.line(
                f"{result} = await self.{self.operator('AnswerGenerate')}(input={self.text()})"
            )
            self.line(f'{text} = {result}["answer"]')
        else:
            name = self.operator("Custom")
            words = self.random.choice(
                ("", f', instruction=self.prompts["{name}"]', ', instruction="Short. "')
            )
            self.line(f"{result} = await self.{name}(input={self.text()}{words})")
            self.line(f'{text} = {result}["response"]')
        self.texts.append(text)

    def many(self) -> None:
        found, turns = self.new("found"), self.random.randint(2, 4)
        self.line(f"{found} = []")
        over = self.random.choice((f"_ in range({turns})", f'_ in "{"abcd"[:turns]}"'))
        self.line(f"for {over}:")
        self.indent += 1
        self.draft()
        self.line(f"{found}.append({self.texts.pop()})")
        self.indent -= 1
        self.lists.append(found)

    def gather(self) -> None:
        found, turns = self.new("found"), self.random.randint(2, 4)
        name = self.operator("Custom")
        self.line("import asyncio")
        self.line(
            f"{found}_all = await asyncio.gather(*[self.{name}(input={self.text()}) "
            f"for _ in range({turns})])"
        )
        self.line(f'{found} = [one["response"] for one in {found}_all]')
        self.lists.append(found)

    def ensemble(self) -> None:
        kind = self.random.choice(("ScEnsemble", "MdEnsemble"))
        result, text = self.new("best"), self.new("text")
        solutions = self.random.choice(self.lists)
        self.line(
            f"{result} = await self.{self.operator(kind)}(solutions={solutions}, problem=problem)"
        )
        self.line(f'{text} = {result}["{"response" if kind == "ScEnsemble" else "solution"}"]')
        self.texts.append(text)

    def each(self) -> None:
        checked, solution = self.new("checked"), self.new("one")
        self.line(f"{checked} = []")
        self.line(f"for {solution} in {self.random.choice(self.lists)}:")
        name = self.operator("Review")
        self.line(f"    verdict = await self.{name}(problem=problem, solution={solution})")
        self.line('    if verdict["review_result"]:')
        self.line(f"        {checked}.append({solution})")
        self.line(f"if not {checked}:")
        self.line(f"    {checked} = [problem]")
        self.lists.append(checked)

    def review(self) -> None:
        verdict, better = self.new("verdict"), self.new("better")
        some = self.texts[-1]
        self.line(f"{verdict} = await self.{self.operator('Review')}(problem, {some})")
        self.line(f'if not {verdict}["review_result"]:')
        self.line(
            f"    {better} = await self.{self.operator('Revise')}(problem, {some}, "
            f'{verdict}["feedback"])'
        )
        self.line(f'    {some} = {better}["solution"]')

    def branch(self) -> None:
        text = self.new("text")
        before = (list(self.texts), list(self.lists))
        for head in (f"if len({self.texts[-1]}) > {self.random.randint(5, 90)}:", "else:"):
            self.line(head)
            self.indent += 1
            self.random.choice((self.draft, self.review))()
            self.line(f"{text} = {self.texts[-1]}")
            self.indent -= 1
            self.texts, self.lists = list(before[0]), list(before[1])
        self.texts.append(text)

    def counted(self) -> None:
        turns = self.new("turns")
        self.line(f"{turns} = 0")
        self.line(f"while {turns} < {self.random.randint(1, 3)}:")
        self.indent += 1
        self.review()
        self.line(f"{turns} += 1")
        self.indent -= 1

    def attempt(self) -> None:
        text = self.new("text")
        self.line("try:")
        self.indent += 1
        self.draft()
        self.line(f"{text} = {self.texts.pop()}.strip()")
        self.indent -= 1
        self.line("except Exception as error:")
        self.line(f"    {text} = str(error)")
        self.texts.append(text)

    def helper(self) -> None:
        name, text = self.new("step"), self.new("text")
        self.helpers.append(
            f"\n    async def {name}(self, text, times=2):\n"
            f"        for _ in range(times):\n"
            f"            got = await self.{self.operator('Custom')}(input=text)\n"
            f'            text = got["response"]\n'
            f"        return text\n"
        )
        times = self.random.choice(("", f", times={self.random.randint(1, 3)}"))
        self.line(f"{text} = await self.{name}({self.text()}{times})")
        self.texts.append(text)

    def join(self) -> None:
        text = self.new("text")
        source = self.random.choice(self.lists) if self.lists else f"{self.texts[-1]}.split()[:3]"
        self.line(f'{text} = "\\n".join(part.strip() for part in {source})')
        self.texts.append(text)

    def program(self) -> None:
        result, text = self.new("computed"), self.new("text")
        name = self.operator("Programmer")
        self.line(f"{result} = await self.{name}(problem=problem, analysis={self.texts[-1]})")
        self.line(f'{text} = {result}["output"]')
        self.texts.append(text)
