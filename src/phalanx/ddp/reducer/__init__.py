"""Turns the gradients of one backward into gradients that all ranks share."""
