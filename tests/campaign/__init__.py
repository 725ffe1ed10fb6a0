"""Random schedules of faults, and a judge of what they leave that shares no code with dcpstore."""
