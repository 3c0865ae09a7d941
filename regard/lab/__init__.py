"""The lab: what the course says, computed in front of the reader's eyes."""
