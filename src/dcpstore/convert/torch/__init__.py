"""DCP checkpoints to and from ``torch.save`` files."""
