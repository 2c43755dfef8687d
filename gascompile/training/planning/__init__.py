"""The program, the costs and the plan of a training step."""
