"""From wanted boxes to bytes in their targets."""
