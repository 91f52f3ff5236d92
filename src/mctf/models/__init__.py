"""Models by name, and weights from files."""
