"""How weights are packed: where values and scales lie, the ops on packed weights, and rounding into them."""
