"""Random numbers that belong to elements, so that they do not depend on the layout."""
