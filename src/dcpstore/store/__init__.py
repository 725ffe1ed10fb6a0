"""Object stores as verbs: the protocol, its engines and its wrappers."""
