"""Training steps that do not fit: capture of forward and backward, updates as ops, the step the user calls."""
