"""Clients for every model that a run talks to, what they cost, and the budget over them."""
