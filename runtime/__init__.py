"""Runs plans: what moves and computes, behind the protocols that stand here."""
