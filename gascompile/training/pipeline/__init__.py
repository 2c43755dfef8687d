"""Pipelines in training: the stages of a step, their micro-batches, and what each rank plans and runs of them."""
