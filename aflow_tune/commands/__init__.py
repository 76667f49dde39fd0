"""The commands of `aflow-tune`, grouped in modules; a submitted job runs `run_submitted`.

Each module has `add_parser(commands)`, which adds its parsers with an `action`: a function from the
parsed options to an exit code. Heavy imports are inside the action, since `--help` imports all.
"""
