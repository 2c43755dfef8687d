"""Training and inference by several processes of one machine, in parts that each run alone; see ``__main__``."""
