"""Traces of plans and runs, as trace-event files and pictures."""
