"""From experiences to weights: Trinity's algorithms and trainers, sync check, resume, metrics."""
