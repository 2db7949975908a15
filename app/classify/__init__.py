"""From what is known before generation to an SLA class. Pure: no clock, no files, no HTTP."""
