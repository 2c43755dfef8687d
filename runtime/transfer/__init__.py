"""Moves between tiers: engines, plans of reads, queues, weights that come and go."""
