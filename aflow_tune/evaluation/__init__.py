"""Measuring a workflow or a model, and comparing two of them."""
