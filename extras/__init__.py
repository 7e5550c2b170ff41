"""One file for one option, which ends in a sentence if the file is deleted."""
