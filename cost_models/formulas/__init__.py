"""Seconds, FLOPs and bytes of one op, from its shapes."""
