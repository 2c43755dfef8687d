"""Libraries that models come from: transformers, its checkpoints and generation, device maps of accelerate."""
