"""One unit: its parameters, their sharded memory, gathering them and reducing their gradients."""
