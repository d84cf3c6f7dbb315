"""What the repository makes of itself: the list of files, and the tables of measurements in its documents."""
