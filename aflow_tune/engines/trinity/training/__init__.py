"""From experiences to weights: Trinity's algorithms and its trainer on our engine, its metrics."""
