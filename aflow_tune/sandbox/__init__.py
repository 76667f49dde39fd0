"""Running programs that a model wrote, where they can hurt nobody."""
