"""Following a written graph on every path, with values that stand for whatever may be there.

    values            what an expression may be, and the heap
    walking           the state of a walk: cost, refusals, paths that part and meet
    using             building and calling operators: what costs something
    methods           methods of data
    functions         the graph's own functions
    python_functions  functions of Python with a rule of their own
    calls             every call
    items             attributes and items
    expressions       every other expression
    turns             how often a `while` turns
    loops             loops and comprehensions
    statements        statements, and the walk as a whole

Each builds on those above it. What comes of it is `bound.py`'s to say.
"""
