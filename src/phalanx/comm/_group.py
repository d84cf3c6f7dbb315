"""Group: the ranks of one generation, and the one place that every collective passes through."""
