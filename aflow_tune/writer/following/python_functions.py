"""What functions of Python give back, as far as the bound of a written graph depends on it.

How long a range, a list or a product is, what is in it, and what waits for what. Every other
function of Python may return whatever it was given (`calls.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from aflow_tune.writer.allowed import FRAMES
from aflow_tune.writer.following.functions import Functions
from aflow_tune.writer.following.using import Given
from aflow_tune.writer.following.values import (
    BROKEN,
    NONE,
    NOTHING,
    NUMBER,
    PLAIN,
    SCALAR,
    TEXT,
    Broken,
    Config,
    Module,
    Number,
    Obj,
    Plain,
    Ref,
    Text,
    Value,
    interval,
    joined,
    most,
    number,
    total,
)
from aflow_tune.writer.refusals import shown
from aflow_tune.writer.types import RefusalKind

MANY = 10**6
"""A length beyond which none is told."""
_WAITED_BY = frozenset(
    {"asyncio.create_task", "asyncio.ensure_future", "asyncio.wait_for", "asyncio.shield"}
)


_KINDS = {"tuple": "tuple", "set": "set", "frozenset": "set", "reversed": "lazy", "filter": "lazy"}
_DICTS = ("dict", "OrderedDict")


def copied(walk: Functions, node: ast.AST, source: Value, name: str) -> Value:
    """What `list(source)`, `sorted(source)`, `dict(source)` and their like give."""
    kind = name.rpartition(".")[2]
    objects = walk.here.objects(source)
    if kind in ("copy", "deepcopy"):
        rest = frozenset(atom for atom in source if not isinstance(atom, Ref))
        copies = [walk.new(node, obj, place) for place, (_, obj) in enumerate(objects)]
        return joined(rest, *copies)
    if not source:
        return walk.new(node, Obj("dict" if kind in _DICTS else _KINDS.get(kind, "list"), 0))
    if kind in _DICTS and len(objects) == 1 == len(source) and objects[0][1].kind == "dict":
        return walk.new(node, objects[0][1])
    turns, items = walk.run_over(source, node)
    if kind in _DICTS:
        inner = [obj for _, obj in walk.here.objects(items)]
        values = joined(PLAIN, *(obj.items for obj in inner))
        return walk.new(node, Obj("dict", turns, values, joined(PLAIN, TEXT)))
    if kind == "Counter":
        return walk.new(node, Obj("dict", turns, NUMBER, items))
    elements = walk.here.elements_of(source) if kind in ("list", "tuple") else None
    made = _KINDS.get(kind, "list")
    over = source if made == "lazy" else NOTHING
    return walk.new(node, Obj(made, turns, items, elements=elements, over=over))


_Special = Callable[[Functions, ast.Call, Given], Value]


def _len(walk: Functions, node: ast.Call, given: Given) -> Value:
    value = walk.settled(given.at(0) or NOTHING, node)
    lengths = [obj.length for _, obj in walk.here.objects(value)]
    lengths += [atom.length for atom in value if isinstance(atom, Text)]
    other = any(not isinstance(atom, (Ref, Text)) for atom in value)
    return number(0, None if other else most(lengths))


def _range(walk: Functions, node: ast.Call, given: Given) -> Value:
    bounds = [interval(value) for value in given.values[:3]]
    if not bounds or given.open:
        return walk.new(node, Obj("range", None, NUMBER))
    start, stop = ((0, 0), bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    step = bounds[2] if len(bounds) > 2 else (1, 1)
    length: int | None = None
    low, high = start[0], None if stop[1] is None else stop[1] - 1
    if step[0] is not None and step[0] > 0 and stop[1] is not None and start[0] is not None:
        length = max(0, -(-(stop[1] - start[0]) // step[0]))
    elif step[1] is not None and step[1] < 0 and start[1] is not None and stop[0] is not None:
        length = max(0, -(-(start[1] - stop[0]) // -step[1]))
        low, high = stop[0] + 1, start[1]
    elif len(bounds) > 2:
        low = high = None
    if length is not None and length > MANY:
        length = None
    return walk.new(node, Obj("range", length, number(low, high)))


def _enumerate(walk: Functions, node: ast.Call, given: Given) -> Value:
    source = given.at(0) or NOTHING
    turns, item = walk.run_over(source, node)
    first = interval(given.at(1, "start") or number(0, 0))
    last = None if turns is None or first[1] is None else first[1] + turns
    counter = number(first[0], last)
    elements = walk.here.elements_of(source)
    if elements is not None:
        pairs = tuple(
            walk.new(node, Obj("tuple", 2, joined(counter, one), elements=(counter, one)), place)
            for place, one in enumerate(elements)
        )
        made = Obj("lazy", turns, joined(NOTHING, *pairs), elements=pairs, over=source)
        return walk.new(node, made)
    pair = Obj("tuple", 2, joined(counter, item), elements=(counter, item))
    return walk.new(node, Obj("lazy", turns, walk.new(node, pair, "pair"), over=source))


def _zip(walk: Functions, node: ast.Call, given: Given) -> Value:
    sources = [walk.run_over(value, node) for value in given.all()]
    lengths = [turns for turns, _ in sources if turns is not None]
    items = tuple(item for _, item in sources)
    known = None if given.open else items
    pair = walk.new(node, Obj("tuple", len(items), joined(NOTHING, *items), elements=known), "pair")
    over = joined(NOTHING, *given.values)
    return walk.new(node, Obj("lazy", min(lengths, default=None), pair, over=over))


def _product(walk: Functions, node: ast.Call, given: Given) -> Value:
    sources = [walk.run_over(value, node) for value in given.values]
    length: int | None = 1
    for turns, _ in sources:
        length = None if turns is None or length is None else length * turns
    repeat = interval(given.named.get("repeat", number(1, 1)))[1]
    length = None if length is None or repeat is None or repeat > 20 else length**repeat
    if given.open or (length is not None and length > MANY):
        length = None
    item = joined(NOTHING, *(item for _, item in sources))
    pair = walk.new(node, Obj("tuple", None, item), "pair")
    return walk.new(node, Obj("lazy", length, pair))


def _chosen_by_size(walk: Functions, node: ast.Call, given: Given) -> Value:
    turns, item = walk.run_over(given.at(0) or NOTHING, node)
    size = interval(given.at(1, "r") or number(None, turns))[1]
    length: int | None = None
    if turns is not None and size is not None and turns <= 20:
        length = 1
        for place in range(min(size, turns)):
            length *= turns - place
    inner = walk.new(node, Obj("tuple", size, item), "pair")
    return walk.new(node, Obj("lazy", length if length is None or length < MANY else None, inner))


def _pairs(walk: Functions, node: ast.Call, given: Given) -> Value:
    turns, item = walk.run_over(given.at(0) or NOTHING, node)
    return walk.new(node, Obj("lazy", turns, walk.new(node, Obj("tuple", 2, item), "pair")))


def _islice(walk: Functions, node: ast.Call, given: Given) -> Value:
    turns, item = walk.run_over(given.at(0) or NOTHING, node)
    stop = interval(given.values[2 if len(given.values) > 2 else 1])[1] if given.at(1) else None
    known = [length for length in (turns, stop) if length is not None]
    over = given.at(0) or NOTHING
    return walk.new(node, Obj("lazy", min(known, default=None), item, over=over))


def _chain(walk: Functions, node: ast.Call, given: Given) -> Value:
    sources = [walk.run_over(value, node) for value in given.values]
    items = joined(NOTHING, *(item for _, item in sources))
    length = None if given.open else total(turns for turns, _ in sources)
    return walk.new(node, Obj("lazy", length, items, over=joined(NOTHING, *given.values)))


def _repeat(walk: Functions, node: ast.Call, given: Given) -> Value:
    times = interval(given.at(1, "times") or number(None, None))[1]
    return walk.new(node, Obj("lazy", times, given.at(0) or NOTHING))


def _sample(walk: Functions, node: ast.Call, given: Given) -> Value:
    turns, item = walk.run_over(given.at(0) or NOTHING, node)
    size = interval(given.at(1, "k") or number(None, None))[1]
    return walk.new(node, Obj("list", turns if size is None else size, item))


def _choice(walk: Functions, node: ast.Call, given: Given) -> Value:
    return walk.run_over(given.at(0) or NOTHING, node)[1]


def _min(walk: Functions, node: ast.Call, given: Given) -> Value:
    if len(given.values) > 1 and not given.open and not given.named:
        bounds = [interval(value) for value in given.values]
        highs = [high for _, high in bounds if high is not None]
        lows = [low for low, _ in bounds]
        if any(isinstance(atom, Number) for value in given.values for atom in value):
            known = None if None in lows else min(low for low in lows if low is not None)
            return number(known, min(highs, default=None))
    return _largest(walk, node, given)


def _max(walk: Functions, node: ast.Call, given: Given) -> Value:
    if len(given.values) > 1 and not given.open and not given.named:
        bounds = [interval(value) for value in given.values]
        if any(isinstance(atom, Number) for value in given.values for atom in value):
            highs = [high for _, high in bounds]
            lows = [low for low, _ in bounds if low is not None]
            top = None if None in highs else max(high for high in highs if high is not None)
            return number(max(lows, default=None), top)
    return _largest(walk, node, given)


def _largest(walk: Functions, node: ast.Call, given: Given) -> Value:
    """One of the items, by a key or as they are."""
    items = []
    for value in given.values:
        turns, item = walk.run_over(value, node) if len(given.values) == 1 else (1, value)
        item = walk.settled(item, node)
        items.append(item)
        for word in ("key",):
            if word in given.named:
                walk.apply(node, given.named[word], [item], turns)
    return joined(NOTHING, given.named.get("default", NOTHING), *items)


def _next(walk: Functions, node: ast.Call, given: Given) -> Value:
    _, item = walk.run_over(given.at(0) or NOTHING, node)
    return joined(item, given.at(1) or NOTHING)


def _gather(walk: Functions, node: ast.Call, given: Given) -> Value:
    lengths: list[int | None] = []
    results: list[Value] = []
    exact = True
    for value in given.values:
        objects = walk.here.objects(value)
        spread = [obj for _, obj in objects if obj.kind == "spread"]
        inner = joined(NOTHING, *(obj.items for obj in spread)) if spread else value
        pending = list(walk.pending_in(inner))
        if not pending and inner and not inner & {Broken(), Plain()}:
            lists = [obj for _, obj in objects if obj.kind in ("list", "tuple", "lazy", "set")]
            cure = (
                "write asyncio.gather(*...) with a star for a list of calls"
                if lists and not spread
                else "hand it calls that are not awaited"
            )
            return walk.refuse(
                RefusalKind.ARGUMENTS, f"asyncio.gather waits for calls; {cure}", node
            )
        exact = exact and not spread
        lengths.append(most(obj.length for obj in spread) if spread else 1)
        results.append(
            joined(NOTHING, *(obj.items for _, obj in pending)) or (inner & BROKEN) or PLAIN
        )
    if "return_exceptions" in given.named:
        results = [joined(result, PLAIN) for result in results]
    elements = tuple(results) if exact else None
    made = walk.new(
        node, Obj("list", total(lengths), joined(NOTHING, *results), elements=elements), "list"
    )
    return walk.new(node, Obj("pending", None, made))


def _waited(walk: Functions, node: ast.Call, given: Given) -> Value:
    value = given.at(0) or NOTHING
    items = joined(NOTHING, *(obj.items for _, obj in walk.pending_in(value)))
    if value and not items and not value & {Broken(), Plain()}:
        message = f"{shown(node.func)} takes a call that is not awaited"
        return walk.refuse(RefusalKind.ARGUMENTS, message, node)
    return walk.new(node, Obj("task", None, items or PLAIN))


def _as_completed(walk: Functions, node: ast.Call, given: Given) -> Value:
    turns, items = walk.run_over(given.at(0) or NOTHING, node)
    return walk.new(node, Obj("lazy", turns, items))


def _new_dict(walk: Functions, node: ast.Call, given: Given) -> Value:
    values = list(given.named.values())
    if given.values:
        made = copied(walk, node, given.values[0], "dict")
        for ref, _ in walk.here.objects(made):
            if values:
                walk.put(ref, joined(*values), len(values), TEXT)
        return made
    return walk.new(
        node, Obj("dict", None if given.open else len(values), joined(NOTHING, *values), TEXT)
    )


def _default_dict(walk: Functions, node: ast.Call, given: Given) -> Value:
    walk.here.let_go(*given.all())
    return walk.new(node, Obj("dict", None, PLAIN, PLAIN))


def _getattr(walk: Functions, node: ast.Call, given: Given) -> Value:
    name = node.args[1] if len(node.args) > 1 else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        message = 'getattr needs the name written out: getattr(prompt_custom, "NAME", "")'
        return walk.refuse(RefusalKind.NOT_ALLOWED, message, node)
    if name.value.startswith("_") or name.value in FRAMES:
        return walk.refuse(RefusalKind.NOT_ALLOWED, f"`{name.value:.40}` is private", name)
    default = given.at(2)
    of_python = any(isinstance(atom, Module) and not atom.shim for atom in given.values[0])
    if default is not None and not of_python:
        found = walk.attribute_if_there(given.values[0], name.value)
        return joined(default, found)
    reading = ast.Attribute(value=node.args[0], attr=name.value, ctx=ast.Load())
    return walk.attribute(ast.copy_location(reading, node))


def _type(walk: Functions, node: ast.Call, given: Given) -> Value:
    if len(given.all()) != 1 or given.open:
        return walk.refuse(RefusalKind.NOT_ALLOWED, "type(...) makes no classes in a graph", node)
    return SCALAR


def _super(walk: Functions, node: ast.Call, given: Given) -> Value:
    return SCALAR


def _scalar(walk: Functions, node: ast.Call, given: Given) -> Value:
    for value in given.all():
        walk.no_calls_in(value, node)
    return SCALAR


def _some_number(walk: Functions, node: ast.Call, given: Given) -> Value:
    value = walk.settled(given.at(0) or number(0, 0), node)
    return value if all(isinstance(atom, Number) for atom in value) else NUMBER


def _abs(walk: Functions, node: ast.Call, given: Given) -> Value:
    low, high = interval(walk.settled(given.at(0) or NOTHING, node))
    return NUMBER if low is None or high is None else number(0, max(abs(low), abs(high)))


def _pushed(walk: Functions, node: ast.Call, given: Given) -> Value:
    """`heapq.heappush(found, one)`: puts one item into a list."""
    for ref, obj in walk.here.objects(given.at(0) or NOTHING):
        walk.check_growth(node, ref)
        walk.put(ref, given.at(1) or PLAIN, 1)
        return joined(obj.items, given.at(1) or NONE)
    walk.here.let_go(*given.all())
    return PLAIN


def _sum(walk: Functions, node: ast.Call, given: Given) -> Value:
    turns, item = walk.run_over(given.at(0) or NOTHING, node)
    item = walk.settled(item, node)
    low, high = interval(item)
    if turns is None or high is None or low is None or low < 0 or given.at(1, "start"):
        return joined(NUMBER, frozenset(atom for atom in item if isinstance(atom, Ref)))
    return number(0, high * turns)


def _config(walk: Functions, node: ast.Call, given: Given) -> Value:
    return frozenset({Config()})


def _model(walk: Functions, node: ast.Call, given: Given) -> Value:
    return walk.build_model(node, given)


def _none(walk: Functions, node: ast.Call, given: Given) -> Value:
    for value in given.all():
        walk.settled(value, node)
    return NONE


def _sleep(walk: Functions, node: ast.Call, given: Given) -> Value:
    return walk.new(node, Obj("pending", None, NONE))


def _context(walk: Functions, node: ast.Call, given: Given) -> Value:
    return walk.new(node, Obj("group", None))


SPECIAL: dict[str, _Special] = {
    "len": _len,
    "range": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "itertools.zip_longest": lambda walk, node, given: walk.new(
        node,
        Obj(
            "lazy",
            most(walk.run_over(v, node)[0] for v in given.values),
            walk.anything(given.values),
        ),
    ),
    "itertools.product": _product,
    "itertools.permutations": _chosen_by_size,
    "itertools.combinations": _chosen_by_size,
    "itertools.combinations_with_replacement": lambda walk, node, given: walk.new(
        node, Obj("lazy", None, walk.anything(given.values))
    ),
    "itertools.pairwise": _pairs,
    "itertools.chain": _chain,
    "itertools.islice": _islice,
    "itertools.repeat": _repeat,
    "random.sample": _sample,
    "random.choices": lambda walk, node, given: walk.new(
        node,
        Obj("list", interval(given.named.get("k", number(1, 1)))[1], _choice(walk, node, given)),
    ),
    "random.choice": _choice,
    "random.shuffle": _none,
    "min": _min,
    "max": _max,
    "next": _next,
    "sum": _sum,
    "int": _some_number,
    "abs": _abs,
    **dict.fromkeys(
        (
            "heapq.heappush",
            "heapq.heappushpop",
            "heapq.heapreplace",
            "bisect.insort",
            "bisect.insort_left",
            "bisect.insort_right",
        ),
        _pushed,
    ),
    "round": _some_number,
    "float": lambda walk, node, given: _some_number(walk, node, given) and NUMBER,
    "ord": lambda walk, node, given: NUMBER,
    "any": _scalar,
    "all": _scalar,
    "bool": _scalar,
    "isinstance": _scalar,
    "hasattr": _scalar,
    "type": _type,
    "super": _super,
    "print": _none,
    "getattr": _getattr,
    "dict": _new_dict,
    "collections.defaultdict": _default_dict,
    "asyncio.gather": _gather,
    "asyncio.as_completed": _as_completed,
    "asyncio.sleep": _sleep,
    "asyncio.Semaphore": _context,
    "asyncio.TaskGroup": _context,
    "asyncio.timeout": _context,
    "model.create_llm_instance": _model,
    "model.AsyncLLM": _model,
    "model.LLMConfig": _config,
    "cost.CostManager": lambda walk, node, given: PLAIN,
    **dict.fromkeys(_WAITED_BY, _waited),
}
