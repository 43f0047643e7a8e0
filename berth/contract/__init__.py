"""Names, values and codecs that cross a process boundary. Pure: no I/O, no clock, no environment."""
