"""Workflows that the policy writes: their form, the check, execution and reward.

The policy answers a problem with a JSON object of prompts and Python graph code; a frozen executor
model runs the graph. `types.py` defines the types of this package.
"""
