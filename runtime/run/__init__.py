"""Sessions and executors: one iteration of a plan, prepared once, measured and counted."""
