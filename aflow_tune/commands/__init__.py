"""The subcommands beside run, validate and init: one module each, named as the command is.
Not among them: `dry_run`, the options of `run` that play a step by a script, and `run_submitted`,
which a submitted job calls.

A module has `add_parser(commands)`, which adds its parser with help that teaches and sets the
default `action`: a function from the parsed options to an exit code. Importing a module must
cost nothing, since `--help` imports them all: heavy imports stand inside the action.
"""
