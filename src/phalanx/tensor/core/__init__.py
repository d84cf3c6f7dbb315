"""The DTensor class and what each of its operations must keep in mind: copied views, modes, memory order."""
