"""Shows a job to the outside: the output of workers and a health check, beside the public events and metrics."""
