"""From a workload, a machine and a budget to a plan: the list of passes."""
