"""What the repository makes of itself: the list of files, tables of measurements, pictures, the documentation site."""
