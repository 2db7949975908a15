"""Values that cross a boundary between two parts. Standard library only."""
