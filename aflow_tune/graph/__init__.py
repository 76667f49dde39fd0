"""Operator graphs: a Python workflow over operators with its prompts; load, run, draw, save."""
