"""Looking into stored checkpoints without loading them: the library behind the command line."""
