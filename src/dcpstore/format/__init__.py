"""Tensors to bytes and back: records, dtypes, checksums. No I/O."""
