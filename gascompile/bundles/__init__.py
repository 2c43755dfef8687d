"""Plans with their programs in files: bundles, their checks, and the cache of plans."""
