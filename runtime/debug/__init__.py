"""Runs that are watched: accesses without order, arenas whose every access is checked."""
