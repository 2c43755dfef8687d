"""Names of a call's arguments, as runners and bundles keep them."""

ANY_NAMES = "**"
"""Behind the names of positional arguments: the model takes others by ``**``, and sees the order they are given in."""
