"""Ray: found, started, joined or sent a job to; and how code and keys reach its workers."""
