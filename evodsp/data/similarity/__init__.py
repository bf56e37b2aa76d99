"""How alike chains are: alignments of two sequences, the sequences of chains, and what copying the nearest chain scores."""
