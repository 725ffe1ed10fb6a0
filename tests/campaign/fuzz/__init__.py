"""Hostile files, made up from seeds and by hand, for every parser of what lies in a bucket."""
