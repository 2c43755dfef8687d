"""A plan is walked without the solver; what breaks a budget or a dependency is refused."""

from gascompile.passes.verify.walk import verify as verify
