"""One clock for ops and links: what a list of steps takes on a machine."""
