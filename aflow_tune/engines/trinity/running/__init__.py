"""A run from its configuration to its result: in one process, on Ray, on Trinity's own engines."""
