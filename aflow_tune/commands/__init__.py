"""The commands, a module each. `run_submitted` is what a submitted job calls.

A module has `add_parser(commands)`, which adds its parser and the `action`: a function from the
parsed options to an exit code. Heavy imports stand inside the action, since `--help` imports all.
"""
