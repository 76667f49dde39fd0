"""The commands, a module each, named as the command is; `run` also has `validate` and `init`.
`run_submitted` is what a submitted job calls.

A module has `add_parser(commands)`, which adds its parser with help that teaches and the `action`:
a function from the parsed options to an exit code. Importing a module must cost nothing, since
`--help` imports them all: heavy imports stand inside the action.
"""
