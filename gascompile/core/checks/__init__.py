"""What files of others must hold before anything is done with them: workloads, machines, plans."""
