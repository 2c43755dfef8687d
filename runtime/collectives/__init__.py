"""Collectives: what ranks exchange in the middle of a run, over the group of a job."""
