"""Operator graphs: load, check, run, draw, write back."""
