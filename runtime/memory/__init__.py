"""Arenas, heaps, pages and files that tensors lie in, and what is counted of them."""
