"""Which weight moves in which format: sensitivity, choice under a ceiling of error, trials, report."""
