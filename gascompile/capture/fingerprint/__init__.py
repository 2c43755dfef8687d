"""Digests of all that a plan is made from: values, code, and where code comes from."""
