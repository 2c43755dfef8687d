"""What optimizers keep per parameter, and their updates as ops."""
