"""DCP checkpoints straight to and from object stores."""
