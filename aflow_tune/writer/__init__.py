"""Workflows that the policy writes: their form, the check, running them, what they earn.

The policy answers a problem with prompts in JSON and graph code in Python; a frozen executor
runs the graph. `types.py` holds the words that this room speaks in.
"""
