"""A module and example inputs become a program: export, and what a trace sees of the model and its inputs."""
