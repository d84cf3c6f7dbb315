"""Dispatch: from a torch call on DTensors to the call on local tensors, with its decision remembered."""
