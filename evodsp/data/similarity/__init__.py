"""Similarity of chains: alignments of two sequences, the sequences of chains, and scores of copies of the nearest chain."""
