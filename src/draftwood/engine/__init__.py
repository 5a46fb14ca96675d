"""The step, who takes part in it, and the interface around it."""
