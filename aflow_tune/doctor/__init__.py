"""What a machine has for a run, looked at before one is started: checks that return lines."""
