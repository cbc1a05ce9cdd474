"""The cases that an engine adds: what an engine is asked for, and what guestd holds inside."""
