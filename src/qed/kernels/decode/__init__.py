"""One token through a block."""
