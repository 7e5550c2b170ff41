"""One file for one option.

Without the file the default job still runs, and the option ends in a sentence.
"""
