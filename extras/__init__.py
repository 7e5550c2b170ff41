"""One file for each option that the default job does not use."""
