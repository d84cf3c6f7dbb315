"""Operators: their names, sharding rules, and the choice among the layouts that a rule allows."""
