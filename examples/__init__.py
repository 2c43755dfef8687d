"""Examples: a search and a text generator within a memory budget."""
