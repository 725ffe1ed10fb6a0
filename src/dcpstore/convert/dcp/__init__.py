"""DCP checkpoints to DCP checkpoints."""
