"""Plans over many ranks and hosts: which rank has which layers of a ring, and which shards of a training step."""
