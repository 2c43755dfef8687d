"""Where the bytes of each weight lie: checkpoints, the store, rows, conversion."""
