"""Layouts: placements and the spec of a distributed tensor, as pure values."""
