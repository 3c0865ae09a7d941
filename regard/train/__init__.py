"""Training: the loss, the schedules, the optimizer and the one loop."""
