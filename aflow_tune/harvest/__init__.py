"""The warm start of a writer: trying candidate graphs, keeping training pairs."""
