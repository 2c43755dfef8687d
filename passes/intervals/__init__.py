"""Plans that move or recompute any tensor between its uses: seeds, decisions, reservations, search."""
