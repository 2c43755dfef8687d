"""Programs in files: a closed grammar, the ops that it allows, reading and writing."""
