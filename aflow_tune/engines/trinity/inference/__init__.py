"""Models asked and nothing trained: evaluation, harvests, a trained policy's answers."""
