"""The attacks that engines add: on what an engine is asked for, and on the limits that guestd enforces inside."""
