"""Pure planning: what goes into which object, and which bytes a load needs."""
