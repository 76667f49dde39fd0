"""Run folders: their layout and state, listing them, cleaning up checkpoints.

Imports no torch, Trinity or Ray, so that listing hundreds of folders is fast.
"""
