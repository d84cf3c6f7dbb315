"""Who holds which ranges of a unit's flat vector, and what is copied where: pure values, no tensors."""
