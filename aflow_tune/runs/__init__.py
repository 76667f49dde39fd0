"""Run folders as such: their layout and state, a list of them, which checkpoints stay.

Light on purpose: a list over hundreds of folders must not wait for torch, Trinity or Ray.
"""
