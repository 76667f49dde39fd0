"""The operators that workflows are made of."""
