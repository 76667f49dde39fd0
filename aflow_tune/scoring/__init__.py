"""Scoring answers: mathematics, question answering, code; what rewards are built from."""
