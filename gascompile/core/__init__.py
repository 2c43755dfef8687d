"""What flows between all rooms: workload, machine, plan, program and reports as frozen data, errors, files."""
