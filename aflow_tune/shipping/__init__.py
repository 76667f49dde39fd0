"""How user code reaches processes that cannot see the user's folders.

What a function needs is found by tracing (`reach.py`: from an object to modules; `reading.py`:
what one file imports, opens and reads from the environment; `tracing.py`: all of it together),
copied into one folder (`bundle.py`), and imported there under the names that it has here
(`arrival.py`), with the paths that objects hold changed (`moving.py`). Nothing in this room knows
how the folder travels; that is the launcher's part.
"""
