"""One file for one option. Each file can be deleted: the default job still runs, and its option ends in one sentence."""
