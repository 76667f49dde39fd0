# ruff: noqa: E501
"""Ordinary graphs as language models write them for AFlow: bodies of `__call__`, all to pass.

Each is `name: body`, or `name: (body, init, rest, head)` as `written_samples.workflow` takes them.
"""

from __future__ import annotations

from written_samples import workflow

ASK = "r = await self.solve(input=problem)\n"
DRAFTS = 'drafts = []\nfor _ in range(3):\n    r = await self.solve(input=problem)\n    drafts.append(r["response"])\n'
GATHER = (
    "import asyncio\n"
    "results = await asyncio.gather(*[self.solve(input=problem) for _ in range(3)])\n"
    'answers = [r["response"] for r in results]\n'
)
PICK = 'best = await self.pick(solutions=drafts, problem=problem)\nreturn best["response"], 0.0'

BODIES: dict[str, str | tuple[str, ...]] = {
    "f-string": ASK + "return f\"Answer: {r['response']!s:>10}\"",
    "strip and lower": ASK + 'return r["response"].strip().lower().rstrip(".")',
    "slice": ASK + 'text = r["response"]\nreturn text[-100:] if len(text) > 100 else text',
    "split lines": ASK + 'lines = r["response"].splitlines()\nreturn lines[-1] if lines else ""',
    "last number": ASK + "import re\nfound = re.findall(r'-?\\d+', r[\"response\"])\n"
    "return found[-1] if found else r['response']",
    "walrus": "import re\n" + ASK + "if (m := re.search(r'boxed\\{(.*?)\\}', r['response'])):\n"
    "    return m.group(1)\nreturn r['response']",
    "majority": GATHER + "return max(set(answers), key=answers.count)",
    "counter": GATHER + "from collections import Counter\n"
    "return Counter(answers).most_common(1)[0][0]",
    "counts by hand": DRAFTS
    + "counts = {}\nfor d in drafts:\n    counts[d] = counts.get(d, 0) + 1\n"
    "return max(counts, key=counts.get)",
    "counts sorted": DRAFTS + "counts = {}\nfor d in drafts:\n    counts.setdefault(d, 0)\n"
    "    counts[d] += 1\nordered = sorted(counts.items(), key=lambda kv: kv[1], reverse=True)\n"
    "return ordered[0][0]",
    "ensemble": DRAFTS + PICK,
    "ensemble of a comprehension": GATHER
    + "best = await self.pick(solutions=answers, problem=problem)\nreturn best['response']",
    "star of a list": "import asyncio\ntasks = []\nfor i in range(3):\n"
    "    tasks.append(self.solve(input=f'{i}: {problem}'))\n"
    "rs = await asyncio.gather(*tasks)\nreturn rs[0]['response']",
    "return exceptions": "import asyncio\n"
    "rs = await asyncio.gather(*[self.solve(problem) for _ in range(3)], return_exceptions=True)\n"
    "good = [r['response'] for r in rs if not isinstance(r, Exception)]\n"
    "return good[0] if good else ''",
    "isinstance dict": ASK + "text = r.get('response', '') if isinstance(r, dict) else str(r)\n"
    "return text",
    "unpack gather": "import asyncio\na, b = await asyncio.gather(\n    self.solve(problem), "
    "self.solve(problem + ' again'))\nreturn a['response'] if a['response'] else b['response']",
    "zip": DRAFTS + "reviews = [await self.review(problem, d) for d in drafts]\n"
    "for d, v in zip(drafts, reviews):\n    if v['review_result']:\n        return d, 0.0\n"
    "return drafts[0]",
    "enumerate": DRAFTS + "text = '\\n'.join(f'{i + 1}. {d}' for i, d in enumerate(drafts))\n"
    "last = await self.solve(input=text)\nreturn last['response']",
    "enumerate from one": "out = ''\nfor i, style in enumerate(['short', 'long'], 1):\n"
    "    r = await self.solve(input=f'{i} {style}: {problem}')\n    out += r['response'] + '\\n'\n"
    "return out",
    "attempts": "for attempt in range(3):\n    r = await self.solve(input=problem)\n"
    "    if r['response'].strip():\n        return r['response']\nreturn 'none'",
    "try": "try:\n    r = await self.solve(input=problem)\n    answer = r['response']\n"
    "except Exception as e:\n    answer = f'failed: {e}'\nreturn answer",
    "try else finally": "tries = 0\ntry:\n    r = await self.solve(input=problem)\n"
    "except (KeyError, ValueError):\n    r = await self.solve(input='again ' + problem)\nelse:\n"
    "    tries += 1\nfinally:\n    tries += 1\nreturn r['response']",
    "retry while": "attempts = 0\nanswer = ''\nwhile attempts < 3 and not answer:\n"
    "    r = await self.solve(input=problem)\n    answer = r['response']\n    attempts += 1\n"
    "return answer",
    "while true": "turns = 0\nwhile True:\n    r = await self.solve(input=problem)\n    turns += 1\n"
    "    if r['response'] or turns >= 3:\n        break\nreturn r['response']",
    "while with a flag": "done = False\nn = 0\nwhile not done:\n"
    "    r = await self.solve(input=problem)\n    n += 1\n    done = n > 2 or 'yes' in r['response']\n"
    "return r['response']",
    "while continue": "i = 0\nanswer = ''\nwhile i < 3:\n    i += 1\n"
    "    r = await self.solve(input=problem)\n    if len(r['response']) < 2:\n        continue\n"
    "    answer = r['response']\nreturn answer or r['response']",
    "while a list is short": "drafts = []\nwhile len(drafts) < 3:\n"
    "    r = await self.solve(input=problem)\n    drafts.append(r['response'])\n" + PICK,
    "while pending": "todo = [problem]\nseen = []\nwhile todo:\n    text = todo.pop()\n"
    "    r = await self.solve(input=text)\n    seen.append(r['response'])\n"
    "    if len(seen) < 3:\n        todo.append(r['response'])\nreturn seen[-1]",
    "steps of a plan": ASK + "steps = [s for s in r['response'].split('\\n') if s.strip()]\n"
    "notes = []\nfor step in steps[:4]:\n    got = await self.solve(input=step)\n"
    "    notes.append(got['response'])\nreturn '\\n'.join(notes)",
    "all steps of a plan": ASK + "answer = ''\nfor step in r['response'].splitlines():\n"
    "    got = await self.solve(input=f'{problem}\\n{step}\\n{answer}')\n    answer = got['response']\n"
    "return answer",
    "sub-questions at once": "import asyncio\n" + ASK + "parts = r['response'].split(';')\n"
    "rs = await asyncio.gather(*(self.solve(input=p) for p in parts))\n"
    "return ' '.join(x['response'] for x in rs)",
    "json": "import json\n" + ASK + "try:\n    data = json.loads(r['response'])\n"
    "except json.JSONDecodeError:\n    data = {}\nreturn str(data.get('answer', r['response']))",
    "json list": "import json\n" + ASK + "try:\n    items = json.loads(r['response'])\n"
    "except ValueError:\n    items = [problem]\nout = []\nfor item in items:\n"
    "    got = await self.solve(input=str(item))\n    out.append(got['response'])\nreturn out[-1]",
    "review and revise": ASK + "answer = r['response']\nfor _ in range(2):\n"
    "    v = await self.review(problem, answer)\n    if v['review_result']:\n        break\n"
    "    better = await self.solve(input=problem + v['feedback'])\n    answer = better['response']\n"
    "return answer, self.llm.get_usage_summary()['total_cost']",
    "for else": "for i in range(2):\n    r = await self.solve(input=problem)\n"
    "    if 'done' in r['response']:\n        break\nelse:\n"
    "    r = await self.solve(input=problem + ' finish')\nreturn r['response']",
    "helper": (
        "return await self.step(problem)",
        "",
        "async def step(self, text):\n"
        "    r = await self.solve(input=text)\n    return r['response']",
    ),
    "helper with defaults": (
        "a = await self.step(problem)\nb = await self.step(a, times=2)\nreturn b",
        "",
        "async def step(self, text: str, times: int = 1, *, hint: str = '') -> str:\n"
        "    for _ in range(times):\n        r = await self.solve(input=hint + text)\n"
        "        text = r['response']\n    return text",
    ),
    "helper of helpers": (
        "return await self.outer(problem)",
        "",
        "async def outer(self, p):\n    return await self.inner(p) + await self.inner(p + '?')\n"
        "async def inner(self, p):\n    return (await self.solve(input=p))['response']",
    ),
    "tuple of a helper": (
        "answer, score = await self.rate(problem)\nreturn answer if score > 0 else 'unsure'",
        "",
        "async def rate(self, p):\n    r = await self.solve(input=p)\n"
        "    return r['response'], len(r['response'])",
    ),
    "delegating helper": (
        "r = await self.ask(problem)\nreturn r['response']",
        "",
        "def ask(self, p):\n    return self.solve(input=p)",
    ),
    "wrapper with stars": (
        "r = await self.safely(self.solve, input=problem)\nreturn r['response']",
        "",
        "async def safely(self, op, *args, **kwargs):\n    try:\n"
        "        return await op(*args, **kwargs)\n    except Exception:\n"
        "        return {'response': ''}",
    ),
    "operator as an argument": (
        "return await self.run(self.solve, problem)",
        "",
        "async def run(self, op, text):\n    r = await op(input=text)\n    return r['response']",
    ),
    "nested function": "async def once(text, n):\n    r = await self.solve(input=f'{n} {text}')\n"
    "    return r['response']\nanswers = [await once(problem, n) for n in range(2)]\n"
    "return answers[-1]",
    "nested counter": "calls = 0\nasync def once(text):\n    nonlocal calls\n    calls += 1\n"
    "    r = await self.solve(input=text)\n    return r['response']\n"
    "a = await once(problem)\nreturn f'{a} ({calls})'",
    "nested normalise": "def normal(text):\n    return ' '.join(text.lower().split())\n"
    + GATHER
    + "groups = {}\nfor a in answers:\n    groups.setdefault(normal(a), []).append(a)\n"
    "largest = max(groups.values(), key=len)\nreturn largest[0]",
    "gather of nested": "import asyncio\nasync def one(i):\n"
    "    r = await self.solve(input=f'{i}) {problem}')\n    return i, r['response']\n"
    "pairs = await asyncio.gather(*[one(i) for i in range(3)])\n"
    "return sorted(pairs, key=lambda p: len(p[1]))[0][1]",
    "recursion with a depth": (
        "return await self.refine(problem, 0)",
        "",
        "async def refine(self, text, depth):\n    r = await self.solve(input=text)\n"
        "    if depth >= 2 or 'final' in r['response']:\n        return r['response']\n"
        "    return await self.refine(r['response'], depth + 1)",
    ),
    "dict of styles": "styles = {'a': 'Be short. ', 'b': 'Be exact. '}\nout = {}\n"
    "for name, style in styles.items():\n"
    "    r = await self.solve(input=problem, instruction=style)\n    out[name] = r['response']\n"
    "return max(out.values(), key=len)",
    "dict comprehension": GATHER + "by_size = {len(a): a for a in answers}\n"
    "return by_size[max(by_size)]",
    "set": GATHER + "unique = list({a.strip() for a in answers})\n"
    "if len(unique) == 1:\n    return unique[0]\n"
    "best = await self.pick(solutions=unique, problem=problem)\nreturn best['response']",
    "filter and map": GATHER + "kept = list(filter(None, map(str.strip, answers)))\n"
    "return kept[0] if kept else ''",
    "any and all": GATHER + "if all(a == answers[0] for a in answers):\n    return answers[0]\n"
    "if any('yes' in a for a in answers):\n    return 'yes'\nreturn answers[-1]",
    "next": GATHER + "return next((a for a in answers if a.isdigit()), answers[0])",
    "next of iter": GATHER + "kept = dict.fromkeys(answers)\nreturn next(iter(kept))",
    "sum and round": GATHER + "scores = [len(a) for a in answers]\n"
    "mean = round(sum(scores) / max(1, len(scores)), 2)\nreturn answers[0] + f' {mean:.2f}'",
    "sort in place": DRAFTS + "drafts.sort(key=len, reverse=True)\nreturn drafts[0]",
    "reversed": DRAFTS + "for d in reversed(drafts):\n    if d:\n        return d\nreturn ''",
    "slices of a list": DRAFTS + "first, *rest = drafts\nreturn rest[0] if rest else first",
    "pop": DRAFTS + "last = drafts.pop()\nwhile drafts and not last:\n    last = drafts.pop()\n"
    "return last",
    "ternaries": ASK + "v = await self.review(problem, r['response'])\n"
    "ok = True if v['review_result'] else False\n"
    "final = r if ok else await self.solve(input=problem)\nreturn final['response']",
    "chained conditions": ASK
    + "size = len(r['response'])\nif 0 < size <= 10:\n    kind = 'short'\n"
    "elif size > 10 and not r['response'].endswith('?'):\n    kind = 'long'\nelse:\n    kind = ''\n"
    "return kind + r['response']",
    "match": ASK + "match r['response'][:1]:\n    case 'A' | 'B':\n        out = r['response']\n"
    "    case _:\n        again = await self.solve(input=problem)\n        out = again['response']\n"
    "return out",
    "lambda": ASK + "clean = lambda text: text.replace(',', '').strip()\n"
    "return clean(r['response'])",
    "int of a text": ASK + "try:\n    value = int(float(r['response']))\n"
    "except (TypeError, ValueError):\n    value = 0\nreturn str(value)",
    "number range": "n = min(3, max(1, len(problem) // 100))\nout = ''\nfor i in range(n):\n"
    "    r = await self.solve(input=problem)\n    out = r['response']\nreturn out",
    "self settings": (
        "out = []\nfor i in range(self.rounds):\n"
        "    r = await self.solve(input=problem)\n    out.append(r['response'])\nreturn out[-1]",
        "self.rounds = 3\nself.cache = {}",
    ),
    "self cache": (
        "if problem in self.cache:\n    return self.cache[problem]\n"
        + ASK
        + "self.cache[problem] = r['response']\nreturn self.cache[problem]",
        "self.cache = {}",
    ),
    "constants of the class": (
        "r = await self.solve(input=problem, instruction=self.HINT)\nreturn r['response']",
        "",
        "HINT = 'Think. '",
    ),
    "constants of the module": (
        "r = await self.solve(input=problem, instruction=HINTS[0])\nreturn r['response']",
        "",
        "",
        "HINTS = ['Think. ', 'Check. ']\n",
    ),
    "list of operators": (
        "rs = [await op(input=problem) for op in self.many]\nreturn rs[-1]['response']",
        "self.many = [operator.Custom(self.llm) for _ in range(2)]",
    ),
    "dict of handlers": (
        "kind = 'math' if any(c.isdigit() for c in problem) else 'text'\n"
        "handler = self.handlers.get(kind, self._text)\nreturn await handler(problem)",
        "self.handlers = {'math': self._math, 'text': self._text}",
        "async def _math(self, p):\n    return (await self.solve(input=p))['response']\n"
        "async def _text(self, p):\n    return (await self.solve(input='Read: ' + p))['response']",
    ),
    "programmer": (
        "r = await self.code(problem=problem, analysis='None')\nreturn r['output'] or r['code']",
        "self.code = operator.Programmer(self.llm)",
    ),
    "programmer and solver": (
        ASK + "p = await self.code(problem=problem, analysis=r['response'])\n"
        "if p['output'] and 'Error' not in str(p['output']):\n    return p['output']\n"
        "return r['response']",
        "self.code = operator.Programmer(self.llm)",
    ),
    "answer generate": (
        "r = await self.answer(input=problem)\nreturn r['answer']",
        "self.answer = operator.AnswerGenerate(self.llm)",
    ),
    "format": (
        ASK + "f = await self.format(problem=problem, solution=r['response'])\n"
        "return f['solution']",
        "self.format = operator.Format(self.llm)",
    ),
    "md ensemble": (
        DRAFTS + "b = await self.vote(solutions=drafts, problem=problem)\nreturn b['solution']",
        "self.vote = operator.MdEnsemble(self.llm, vote_count=3)",
    ),
    "two ensembles": GATHER + "a = await self.pick(solutions=answers[:2], problem=problem)\n"
    "b = await self.pick(solutions=[a['response'], answers[-1]], problem=problem)\n"
    "return b['response']",
    "positional": "r = await self.solve(problem, 'Be exact. ')\nreturn r['response']",
    "text over lines": 'r = await self.solve(\n    input=problem,\n    instruction=(\n        "One. "\n'
    '        "Two. "\n    ),\n)\nreturn r["response"]',
    "format method": ASK + 'text = "{}: {name}".format(problem, name=r["response"])\nreturn text',
    "percent": ASK + "return '%s (%d)' % (r['response'], len(problem))",
    "join of a generator": GATHER + "return ' | '.join(a for a in answers if a)",
    "nested loops": "best = ''\nfor style in ('a', 'b'):\n    for turn in range(2):\n"
    "        r = await self.solve(input=f'{style}{turn} {problem}')\n"
    "        if len(r['response']) > len(best):\n            best = r['response']\nreturn best",
    "list of pairs": "pairs = [('a', 1), ('b', 2)]\nout = []\nfor name, weight in pairs:\n"
    "    r = await self.solve(input=name + problem)\n    out.append((weight, r['response']))\n"
    "out.sort(key=lambda p: p[0])\nreturn out[-1][1]",
    "weights": GATHER + "weights = {}\nfor i, a in enumerate(answers):\n"
    "    weights[a] = weights.get(a, 0.0) + 1.0 / (i + 1)\n"
    "return max(weights.items(), key=lambda x: x[1])[0]",
    "defaultdict": GATHER + "from collections import defaultdict\nvotes = defaultdict(int)\n"
    "for a in answers:\n    votes[a.strip()] += 1\nreturn max(votes, key=votes.get)",
    "deque": "from collections import deque\nqueue = deque([problem])\nlast = ''\n"
    "for _ in range(3):\n    if not queue:\n        break\n"
    "    r = await self.solve(input=queue.popleft())\n    last = r['response']\n"
    "    queue.append(last)\nreturn last",
    "product": "import itertools\nout = []\nfor a, b in itertools.product(['x', 'y'], [1, 2]):\n"
    "    r = await self.solve(input=f'{a}{b}{problem}')\n    out.append(r['response'])\nreturn out[0]",
    "combinations": GATHER + "from itertools import combinations\nsame = 0\n"
    "for a, b in combinations(answers, 2):\n    same += a == b\nreturn answers[0] if same else '?'",
    "random": "import random\n" + GATHER + "return random.choice(answers)",
    "math": "import math\n" + ASK + "return str(math.ceil(len(r['response']) / 2)) + r['response']",
    "wait for": "import asyncio\ntry:\n"
    "    r = await asyncio.wait_for(self.solve(input=problem), timeout=30)\n"
    "except asyncio.TimeoutError:\n    r = await self.solve(input=problem)\nreturn r['response']",
    "tasks": "import asyncio\na = asyncio.create_task(self.solve(input=problem))\n"
    "b = asyncio.create_task(self.solve(input='check ' + problem))\nx = await a\ny = await b\n"
    "return x['response'] + y['response']",
    "as completed": "import asyncio\ntasks = [self.solve(input=problem) for _ in range(2)]\n"
    "for done in asyncio.as_completed(tasks):\n    r = await done\n    if r['response']:\n"
    "        return r['response']\nreturn ''",
    "task group": "import asyncio\nasync with asyncio.TaskGroup() as group:\n"
    "    a = group.create_task(self.solve(input=problem))\n"
    "    b = group.create_task(self.solve(input=problem))\n"
    "return a.result()['response'] + b.result()['response']",
    "partial": "import asyncio, functools\nask = functools.partial(self.solve, instruction='Be. ')\n"
    "r = await ask(input=problem)\nreturn r['response']",
    "assert": ASK + "assert r['response'], 'empty'\nreturn r['response']",
    "raise": ASK + "if not r['response']:\n    raise ValueError('no answer')\nreturn r['response']",
    "docstrings": ('"""Solve it."""\n' + ASK + "# done\nreturn r['response']"),
    "annotated": "answer: str = ''\nscores: list[float] = []\n"
    + ASK
    + "answer = r['response']\nscores.append(1.0)\nreturn answer",
    "print": ASK + "print('got', r)\nreturn r['response']",
    "prompts get": "r = await self.solve(input=problem, instruction=self.prompts.get('solve', ''))\n"
    "return r['response']",
    "result get": ASK + "return r.get('response', '').strip() or 'none'",
    "results in a list": "rs = []\nfor _ in range(2):\n    rs.append(await self.solve(input=problem))\n"
    "texts = [x.get('response') for x in rs]\nreturn texts[0]",
    "results in a dict": "out = {}\nfor k in ['a', 'b']:\n    out[k] = await self.solve(input=k + problem)\n"
    "return out['a']['response'] + out['b']['response']",
    "feedback joined": DRAFTS
    + "notes = ''\nfor d in drafts:\n    v = await self.review(problem, d)\n"
    "    notes += f\"- {v['feedback']}\\n\"\nr = await self.solve(input=problem + notes)\n"
    "return r['response']",
    "scores sorted": DRAFTS
    + "scored = []\nfor d in drafts:\n    v = await self.review(problem, d)\n"
    "    scored.append({'text': d, 'ok': bool(v['review_result'])})\n"
    "scored.sort(key=lambda s: (s['ok'], len(s['text'])), reverse=True)\nreturn scored[0]['text']",
    "early answer": "if not problem.strip():\n    return 'nothing to do', 0.0\n"
    + ASK
    + "return r['response'], 0.0",
    "reassigned": "solution = await self.solve(input=problem)\nsolution = solution['response']\n"
    "solution = await self.solve(input=solution)\nreturn solution['response']",
    "same name twice": "x = problem\nfor _ in range(2):\n    x = await self.solve(input=str(x))\n"
    "    x = x['response']\nreturn x",
    "augmented list": "parts = []\nfor i in range(2):\n    r = await self.solve(input=problem)\n"
    "    parts += [r['response']]\nreturn '\\n'.join(parts)",
    "model": "a = await self.llm('Hint for: ' + problem)\nr = await self.solve(input=problem + a)\n"
    "return r['response']",
    "cost": ASK + "cost = self.llm.get_usage_summary()['total_cost']\nreturn r['response'], cost",
    "heapq": "import heapq\n" + GATHER + "return heapq.nlargest(1, answers, key=len)[0]",
    "walrus over lines": "import re\n" + ASK + "text = (\n    m.group(1)\n"
    "    if (m := re.search('x(.*)', r['response']))\n    else r['response']\n)\nreturn text",
    "one key or another": ASK + "return r.get('answer') or r.get('response') or ''",
    "similar": "from difflib import SequenceMatcher\n"
    + GATHER
    + "def near(a, b):\n    return SequenceMatcher(None, a, b).ratio()\n"
    "totals = [sum(near(a, b) for b in answers) for a in answers]\n"
    "return answers[totals.index(max(totals))]",
}
GRAPHS = {
    name: workflow(body) if isinstance(body, str) else workflow(*body)
    for name, body in BODIES.items()
}
