"""Starting explorer and trainer: in one process, as actors on Ray, or by Trinity's own launcher."""
