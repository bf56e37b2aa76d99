"""Templates: `hits` (the record of a hit, and its filters) -> `features` (its residues in a structure, and arrays of them).

`source` does all of it for one query, and finds hits without a search program.
"""
