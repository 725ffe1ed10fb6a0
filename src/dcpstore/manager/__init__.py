"""The training loop's side: saves in the background, and which checkpoints of a run to keep."""
