"""Pure functions from program and machine to a plan that is proven and verified; they know no runtime."""
