"""What every call needs whatever it is made on: arguments, jobs, outcomes, transcripts, events, tools."""
