"""Before a run: `doctor`, `run --dry-run` and `estimate`."""
