"""Forward and backward of a loss become one straight line of ops, and what a trace of them sees."""
