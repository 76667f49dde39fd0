"""The configuration: how it is read, and what single parts of it mean."""
