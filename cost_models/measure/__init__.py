"""Measures this machine: memory, disk, links, and ops at their own shapes."""
