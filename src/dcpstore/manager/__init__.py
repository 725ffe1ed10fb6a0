"""The checkpoints of a training run: saving in the background, keeping, removing, resuming."""
