"""What users call: compile, plan, simulate, load, calibrate, and the compiled model."""
