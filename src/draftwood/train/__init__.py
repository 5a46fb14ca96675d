"""Training drafters: what is minimised, by which steps, and a loop that can be stopped anywhere and goes on exactly."""
