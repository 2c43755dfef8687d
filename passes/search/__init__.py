"""Plans that move weights through an arena: known strategies, the integer program, schedules, sites."""
