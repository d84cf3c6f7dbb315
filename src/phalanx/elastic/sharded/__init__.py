"""Jobs whose state is cut into cells: who holds what, and what follows from a loss."""
