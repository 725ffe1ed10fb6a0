"""DCP checkpoints to and from safetensors folders."""
