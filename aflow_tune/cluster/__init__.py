"""Ray: joining and starting clusters, code and keys for their workers, jobs, machines."""
