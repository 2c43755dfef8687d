"""Whether calls after the first, as eager makes them, compute what was captured."""
