"""Ray: finding, starting and joining one, what is sent to its workers, jobs and machines."""
