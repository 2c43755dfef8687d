"""The values of a model that is trained: in files, open tensors and checkpoints, and how they go back."""
