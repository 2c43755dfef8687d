"""Passes over the captured graph: what ops cost and allocate, how they divide, the moves as nodes."""
