"""From tensors to objects, and the commit that makes them a checkpoint."""
