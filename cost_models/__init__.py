"""What ops and moves take: formulas, simulation of plans, measurement of machines."""
