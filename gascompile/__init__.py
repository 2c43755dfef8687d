"""GASCompile: run PyTorch models that do not fit, by an ahead-of-time plan."""
