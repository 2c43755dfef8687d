"""Times that no plan beats: linear programs, the physical limit, shadow prices, certificates."""
