"""Transformers' own tests of generation and of its Trainer, run against what GASCompile puts in their place."""
